"""Requests that wait for their immediate answers, by the number of the call that the daemon repeats in them."""

import itertools
from enum import Enum, auto


class Kind(Enum):
    """What was asked."""

    OFFER = auto()
    EXTEND = auto()
    """of an offer that grows, or its close"""
    PULL = auto()
    CANCEL = auto()
    """the worker's; its outcome is that of what it cancels"""
    SETTLE = auto()
    """a cancel by the core, to learn whether the daemon knows a request"""
    STATUS = auto()


class Calls:
    """Each call is of one kind, about one offer or pull; `""` for none."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._waiting: dict[int, tuple[Kind, str]] = {}
        self._of: dict[str, list[int]] = {}

    def draw(self) -> int:
        """A number for a call."""
        return next(self._numbers)

    def begin(self, call: int, kind: Kind, request: str = "") -> int:
        """The call waits from now on."""
        self._waiting[call] = (kind, request)
        if request:
            self._of.setdefault(request, []).append(call)
        return call

    def answered(self, call: int) -> tuple[Kind | None, str]:
        """Takes out a call that has its answer; None if it does not wait (any more)."""
        kind, request = self._waiting.pop(call, (None, ""))
        if request:
            self._of[request].remove(call)
        return kind, request

    def take_back(self) -> tuple[Kind | None, str]:
        """Takes out the call that began last."""
        return self.answered(next(reversed(self._waiting)))

    def forget(self, request: str) -> None:
        """Drops the calls about what has ended, most of which get no answer."""
        for call in self._of.pop(request, ()):
            self._waiting.pop(call, None)

    def lose(self) -> dict[int, tuple[Kind, str]]:
        """All that wait, none of which is answered any more."""
        lost, self._waiting = self._waiting, {}
        self._of.clear()
        return lost
