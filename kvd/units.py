"""Quantities, and texts of others, for people."""

from typing import Final

_LEFT_OUT: Final = "[...]"


def size(count: float) -> str:
    """Bytes with three significant digits: `1.5 GiB`."""
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if count < 999.5:  # what is rounded up to 1000 has four digits
            break
        count, unit = count / 1024, larger
    return f"{count:.3g} {unit}"


def printable(text: str) -> str:
    """A text of others on one line: what would move a terminal's cursor, or is no text, is replaced."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else "?" for each in text)


def shortened(text: str, most: int) -> str:
    """A text of `most` characters at most: of a longer one the middle, which is what it quotes, is left out."""
    if len(text) <= most:
        return text
    left = most - len(_LEFT_OUT)
    return text[: left - left // 2] + _LEFT_OUT + text[len(text) - left // 2 :]
