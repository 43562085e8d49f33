"""How much is logged: what clients and servers do wrong must not fill a disk."""

import logging
import time

from kvd.router import limits


class FewLines(logging.Filter):
    """Lets `limits.LINES` lines a minute through from each place in the code, and says how many it left out."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: dict[tuple[str, int], tuple[float, int]] = {}
        """Where a line comes from: when its minute began, in monotonic time, and how many came since."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether `record` is logged."""
        now, place = time.monotonic(), (record.pathname, record.lineno)
        began, lines = self._lines.get(place, (now, 0))
        if now - began >= 60:
            if lines > limits.LINES:
                record.msg, record.args = (
                    f"{record.getMessage()} ({lines - limits.LINES} more were not logged)",
                    (),
                )
            began, lines = now, 0
        self._lines[place] = began, lines + 1
        return lines < limits.LINES
