"""app.py with a model that takes SECONDS per token: python tests/slow_app.py SECONDS [options of app.py]."""

from __future__ import annotations

import sys

from fake_model import FakeModel

import paligemma
from paligemma.webapp import cli

if __name__ == "__main__":
    seconds = float(sys.argv.pop(1))
    paligemma.load = lambda *_, **__: FakeModel(("▁a",) * 40, seconds_per_token=seconds)
    cli.main()
