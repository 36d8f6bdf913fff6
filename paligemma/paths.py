"""Paths of the files shipped with the package: the bundled model, the examples and the web page."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent

# A wheel contains assets/ inside the package; in a checkout it is next to the package.
ASSETS = _PACKAGE / "assets" if (_PACKAGE / "assets").is_dir() else _PACKAGE.parent / "assets"
BUNDLED_MODEL = ASSETS / "demo"
