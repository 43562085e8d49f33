"""Text that others have a say in, in a table of rich's."""

from rich.markup import escape

from kvd.units import printable


def shown(text: str) -> str:
    """For a terminal: peers, other processes, and whoever listens at a socket may have chosen it."""
    return escape(printable(text))
