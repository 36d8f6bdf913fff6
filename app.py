"""Web application: `python app.py`. See `python app.py --help` for the options."""

import contextlib

with contextlib.suppress(ImportError):
    import spaces  # noqa: F401 - on ZeroGPU it patches CUDA, so it must be imported before torch

from paligemma.webapp.cli import main

if __name__ == "__main__":
    main()
