"""app.py, told to load a model that takes SECONDS a token: python tests/slow_app.py SECONDS [flags of app.py]."""

from __future__ import annotations

import sys

from fake_model import FakeModel

import paligemma
from paligemma.webapp import cli

if __name__ == "__main__":
    seconds = float(sys.argv.pop(1))
    paligemma.load = lambda *_, **__: FakeModel(("▁a",) * 40, seconds_a_token=seconds)
    cli.main()
