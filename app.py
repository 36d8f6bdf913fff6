"""Entry point of the web app: `python app.py`. See `python app.py --help` for the options."""

import contextlib

with contextlib.suppress(ImportError):
    import spaces  # noqa: F401 - only installed on Spaces; patches CUDA for ZeroGPU, so it is imported before torch

from paligemma.webapp.cli import main

if __name__ == "__main__":
    main()
