"""Bounds what unfinished frames take, over all connections of a user."""

import os
from collections import Counter

from kvd import limits
from kvd.errors import ErrorCode, refusal


class UnfinishedBytes:
    """The bytes of one connection's unfinished frame, bounded together with those of its user's others, `by_user`."""

    def __init__(self, uid: int, by_user: Counter[int]) -> None:
        self._uid = uid
        self._by_user = by_user
        self._own = 0

    def set(self, size: int) -> None:
        """Replaces what was counted for this connection.

        Raises:
            Unavailable: `OVERLOADED`, the user's connections together, or those of all strangers, are above the bound.

        """
        if size == self._own:
            return
        self._by_user[self._uid] += size - self._own
        self._own = size
        if self._by_user[self._uid] > limits.MAX_UNFINISHED_BYTES_PER_USER:
            text = f"unfinished frames of user {self._uid} exceed {limits.MAX_UNFINISHED_BYTES_PER_USER} bytes"
            raise refusal(ErrorCode.OVERLOADED, f"{text}; attach fewer workers at a time")
        trusted = (0, os.geteuid())
        others = sum(count for user, count in self._by_user.items() if user not in trusted)
        if self._uid not in trusted and others > limits.MAX_UNFINISHED_BYTES_OF_STRANGERS:
            text = f"unfinished frames of all users but root and the daemon's own take {others} bytes"
            bound = limits.MAX_UNFINISHED_BYTES_OF_STRANGERS
            raise refusal(ErrorCode.OVERLOADED, f"{text}, the bound is {bound}; try again later")

    def release(self) -> None:
        """The connection is over."""
        self._by_user[self._uid] -= self._own
        self._own = 0
        if not self._by_user[self._uid]:
            del self._by_user[self._uid]
