"""The server's log: a line an event, and never a token of the hub."""

from __future__ import annotations

import logging

from paligemma.checkpoint.hub import redact_tokens

LINE = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class TokenlessFormatter(logging.Formatter):
    """Writes lines in which whatever looks like a token is left out, also in what an exception says."""

    def format(self, record: logging.LogRecord) -> str:
        return redact_tokens(super().format(record))


def set_up() -> None:
    """Send the program's log to stderr, and leave out what HTTP clients say of every request."""
    handler = logging.StreamHandler()
    handler.setFormatter(TokenlessFormatter(LINE))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    for client in ("httpx", "httpx2"):  # Gradio's and huggingface_hub's
        logging.getLogger(client).setLevel(logging.WARNING)
