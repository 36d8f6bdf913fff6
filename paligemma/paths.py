"""Where the files that ship with the package are: the bundled model, the examples and the page."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent

# A wheel carries assets/ inside the package; in a checkout it is next to the package.
ASSETS = next(folder for folder in (_PACKAGE / "assets", _PACKAGE.parent / "assets") if folder.is_dir())
BUNDLED_MODEL = ASSETS / "demo"
