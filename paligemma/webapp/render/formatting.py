"""Text formatting shared by the parts of the page."""

from __future__ import annotations

import unicodedata

_REPLACEMENTS = {"▁": "␣", " ": "␣", "\n": "↵", "\t": "⇥", "\r": "␍"}
# First letters of the Unicode categories without a glyph of their own: control and format characters, combining marks,
# separators.
_INVISIBLE_CATEGORIES = ("C", "M", "Z")


def visible_text(token_str: str) -> str:
    """Make every character of a token visible: `▁cat` -> `␣cat`, a newline -> `↵`, U+200B -> `\\u200b`."""
    return "".join(map(_visible_character, token_str))


def format_percentage(share: float) -> str:
    """Format a probability: `97.3 %`, `< 0.1 %`, `> 99.9 %`. `0 %` and `100 %` are exact."""
    if share in (0.0, 1.0):
        return f"{share * 100:.0f} %"
    if share < 0.001:
        return "< 0.1 %"
    return "> 99.9 %" if share > 0.999 else f"{share * 100:.1f} %"


def _visible_character(character: str) -> str:
    if character in _REPLACEMENTS:
        return _REPLACEMENTS[character]
    if unicodedata.category(character)[0] not in _INVISIBLE_CATEGORIES:
        return character
    code = ord(character)
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"
