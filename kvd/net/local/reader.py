"""Reads the frames of one of many connections, in turns and within bounds: each gets the same share of time."""

import asyncio
from abc import ABC, abstractmethod
from collections import Counter, deque
from typing import Final, Generic, TypeVar

from kvd import limits
from kvd.errors import ErrorCode, KvdError, refusal
from kvd.net.interface import Intake
from kvd.net.unix import ReadWatch, is_trusted


class UnfinishedBytes:
    """The bytes of one connection's unfinished frame, bounded together with those of its user's others, `by_user`."""

    def __init__(self, uid: int, by_user: Counter[int]) -> None:
        self._uid = uid
        self._by_user = by_user
        self.own = 0

    def set(self, size: int) -> None:
        """Replaces what was counted for this connection.

        Raises:
            Unavailable: `OVERLOADED`, the user's connections together, or those of all strangers, are above the bound.

        """
        self._by_user[self._uid] += size - self.own
        self.own = size
        if self._by_user[self._uid] > limits.MAX_UNFINISHED_BYTES_PER_USER:
            text = f"unfinished frames of user {self._uid} exceed {limits.MAX_UNFINISHED_BYTES_PER_USER} bytes"
            raise refusal(ErrorCode.OVERLOADED, f"{text}; attach fewer workers at a time")
        if is_trusted(self._uid):
            return
        others = sum(count for user, count in self._by_user.items() if not is_trusted(user))
        if others > limits.MAX_UNFINISHED_BYTES_OF_STRANGERS:
            text = f"unfinished frames of all users but root and the daemon's own take {others} bytes"
            bound = limits.MAX_UNFINISHED_BYTES_OF_STRANGERS
            raise refusal(ErrorCode.OVERLOADED, f"{text}, the bound is {bound}; try again later")

    def release(self) -> None:
        """The connection is over."""
        self._by_user[self._uid] -= self.own
        self.own = 0
        if not self._by_user[self._uid]:
            del self._by_user[self._uid]


FRAMES_PER_TURN: Final = 4
"""Frames of one connection that are delivered before others get their turn; an honest one rarely has more than one."""

T = TypeVar("T")


class FrameReader(ABC, Generic[T]):
    """Delivers the frames of a connection, a few per turn and as `intake` admits them; meanwhile it reads no more."""

    def __init__(self, descriptor: int, intake: Intake) -> None:
        self.frames: deque[T] = deque()
        """Read but not delivered."""
        self.loop = asyncio.get_running_loop()
        self._watch = ReadWatch(descriptor, self._readable)
        self._intake = intake
        self._stopped = False
        self._watch.start()

    @abstractmethod
    def receive(self) -> bool:
        """Reads once and adds the frames that this completes, or leaves them to `more`; False if the other end is gone.

        Raises:
            KvdError: the connection cannot be used any more.

        """

    def more(self) -> bool:
        """Adds the next frame of what was read, if decoding all at once would take others' time; False if none is left.

        Raises:
            KvdError: the connection cannot be used any more.

        """
        return False

    @abstractmethod
    def deliver(self, frame: T) -> None:
        """Takes a frame; may stop the reader."""

    @abstractmethod
    def lost(self, error: KvdError | None) -> None:
        """Closes the connection: the other end is gone, or `receive` or `more` raised `error`."""

    def admits(self) -> bool:
        """Whether a frame may be delivered now; if not, `deliver_frames` is called later."""
        return self._intake.admits(self.deliver_frames)

    def stop(self) -> None:
        """Reads and delivers no more; call it before the descriptor is closed."""
        self._watch.stop()
        self._stopped = True

    def deliver_frames(self) -> None:
        """Delivers this turn's frames, then reads on if none are left."""
        for _ in range(FRAMES_PER_TURN):
            if self._stopped:
                return
            try:
                left = bool(self.frames) or self.more()
            except KvdError as error:
                self.lost(error)
                return
            if not left:
                self._watch.start()
                return
            if not self.admits():
                self._watch.stop()
                return
            try:
                self.deliver(self.frames.popleft())
            except Exception:  # a defect: it costs the frame that met it, not those behind it
                self._deliver_soon()
                raise
        self._deliver_soon()

    def _deliver_soon(self) -> None:
        if not self._stopped:
            self._watch.stop()
            self.loop.call_soon(self.deliver_frames)

    def _readable(self) -> None:
        try:
            alive = self.receive()
        except KvdError as error:
            self.lost(error)
            return
        if alive:
            self.deliver_frames()
        else:
            self.lost(None)
