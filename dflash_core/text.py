"""Text for a terminal: safe, aligned whatever the script, with bars where the encoding has them."""

from __future__ import annotations

import unicodedata

_EIGHTHS = ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")


def printable(text: str, unicode: bool) -> str:
    """`text` without what would steer the terminal, and without what it cannot show unless `unicode`."""
    return "".join(c if c.isprintable() and (unicode or c.isascii()) else "?" for c in text)


def num_columns(text: str) -> int:
    """Columns that `text` takes: two for a wide character, as Chinese has them."""
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def pad(text: str, width: int) -> str:
    """`text` filled up with spaces to `width` columns."""
    return text + " " * (width - num_columns(text))


def bar(share: float, width: int, unicode: bool) -> str:
    """A bar of `share` (0 to 1) of `width` columns, in eighths of a column if `unicode`."""
    if not unicode:
        return "#" * round(share * width)
    full, eighths = divmod(round(share * width * 8), 8)
    return "█" * full + _EIGHTHS[eighths]
