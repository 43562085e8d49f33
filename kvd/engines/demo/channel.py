"""An engine's connection to the router: messages in on standard input, out on standard output."""

import os
import select
from typing import Any, Generic, TypeVar

import msgspec

from kvd.engines.demo.messages import Message

T = TypeVar("T")


class Lines(Generic[T]):
    """Splits what is read from a pipe into messages."""

    def __init__(self, kinds: Any) -> None:
        self._decoder = msgspec.json.Decoder(kinds)
        self._rest = b""

    def feed(self, data: bytes) -> list[T]:
        """The messages that `data` completes."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [self._decoder.decode(line) for line in lines]


def line(message: Message) -> bytes:
    """`message` as `Lines` reads it."""
    return msgspec.json.encode(message) + b"\n"


class Channel(Generic[T]):
    """Reads with a time-out, so that an engine can work meanwhile."""

    def __init__(self, kinds: Any, source: int = 0, sink: int = 1) -> None:
        self._lines: Lines[T] = Lines(kinds)
        self._source = source
        self._sink = sink

    def receive(self, timeout: float) -> list[T]:
        """Waits up to `timeout` seconds for messages; returns as soon as there are any.

        Raises:
            EOFError: The router is gone.

        """
        if not select.select([self._source], [], [], timeout)[0]:
            return []
        data = os.read(self._source, 1 << 16)
        if not data:
            raise EOFError
        return self._lines.feed(data)

    def send(self, message: Message) -> None:
        """Sends a message to the router."""
        data = line(message)
        while data:
            data = data[os.write(self._sink, data) :]
