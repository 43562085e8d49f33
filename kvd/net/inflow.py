"""What arrives on one of many connections, in turns: everybody has the same share of what the daemon can take in."""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from typing import Final, Generic, TypeVar

from kvd.errors import KvdError
from kvd.net.interface import Intake

FRAMES_PER_TURN: Final = 4
"""Frames of one connection that are handed on before others get their turn: an honest one mostly has one."""

T = TypeVar("T")


class Inflow(Generic[T]):
    """Hands on the frames of a connection, a few a turn and as `intake` admits them; nothing more is read meanwhile.

    `receive` reads once: the frames that this completes, or None where the other end is gone. Each goes to `deliver`.
    `lost` is called when nothing more can come, with the `KvdError` that `receive`, or its frames, raised.
    """

    def __init__(
        self,
        descriptor: int,
        receive: Callable[[], Iterable[T] | None],
        deliver: Callable[[T], None],
        lost: Callable[[KvdError | None], None],
        intake: Intake,
    ) -> None:
        self._descriptor = descriptor
        self._receive = receive
        self._deliver = deliver
        self._lost = lost
        self._intake = intake
        self._loop = asyncio.get_running_loop()
        self._frames: Iterator[T] = iter(())
        self._first: T | None = None
        """Of the frames that were read and not handed on."""
        self._reading = self._stopped = False
        self._read_on()

    def stop(self) -> None:
        """Reads and hands on no more: before the descriptor is closed."""
        if not self._stopped:
            self._stopped = True
            self._loop.remove_reader(self._descriptor)

    def left(self) -> Iterator[T]:
        """The frames that were read and will not be handed on, each once."""
        while (frame := self._next()) is not None:
            self._first = None
            yield frame

    def _readable(self) -> None:
        try:
            frames = self._receive()
        except KvdError as error:
            self._lost(error)
            return
        if frames is None:
            self._lost(None)
            return
        self._frames = iter(frames)
        self._hand_on()

    def _hand_on(self) -> None:
        for _ in range(FRAMES_PER_TURN):
            if self._stopped:
                return
            try:
                frame = self._next()
            except KvdError as error:
                self._lost(error)
                return
            if frame is None:
                self._read_on()
                return
            if not self._intake.admits(self._hand_on):
                self._pause()
                return
            self._first = None
            self._deliver(frame)
        if not self._stopped:
            self._pause()
            self._loop.call_soon(self._hand_on)

    def _next(self) -> T | None:
        if self._first is None:
            self._first = next(self._frames, None)
        return self._first

    def _read_on(self) -> None:
        if not self._reading:
            self._reading = True
            self._loop.add_reader(self._descriptor, self._readable)

    def _pause(self) -> None:
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._descriptor)
