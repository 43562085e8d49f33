"""Messages between the demo's router and its two engines: JSON, one per line.

An engine reads them from its standard input and writes them to its standard output.
"""

import os
import select
from typing import Any, Generic, TypeVar

import msgspec


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of an engine's process. Every rank's pool has `num_blocks` blocks of `block_tokens` tokens."""

    name: str
    socket: str
    layout: str
    tp_size: int
    block_tokens: int
    num_blocks: int
    seed: int


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of the messages; the class name is the tag."""


# --- to the prefill engine ------------------------------------------------------------------------------------------


class Prompt(Message, frozen=True):
    """Prefill these tokens and offer their blocks."""

    request: str
    tokens: list[int]


# --- to the decode engine -------------------------------------------------------------------------------------------


class DecodeRequest(Message, frozen=True):
    """Pull the KV of `prompt_tokens` tokens with `ticket`; continue from `token` until there are `count` tokens."""

    request: str
    prompt_tokens: int
    token: int
    count: int
    ticket: str


# --- to both --------------------------------------------------------------------------------------------------------


class Stop(Message, frozen=True):
    """Return the pools and exit."""


# --- from both ------------------------------------------------------------------------------------------------------


class Ready(Message, frozen=True):
    """The pools are attached; requests may come."""


class Failed(Message, frozen=True):
    """A request has failed."""

    request: str
    text: str


# --- from the prefill engine ----------------------------------------------------------------------------------------


class Prefilled(Message, frozen=True):
    """The first token, and the ticket of the blocks that hold the prompt's KV."""

    request: str
    token: int
    ticket: str


class Released(Message, frozen=True):
    """Every rank's offer was released and the blocks are free; `reasons` has an entry for each rank."""

    request: str
    reasons: list[str]


# --- from the decode engine -----------------------------------------------------------------------------------------


class Pulled(Message, frozen=True):
    """Every rank's `blocks` are there. The times are of the monotonic clock, in seconds."""

    request: str
    blocks: list[int]
    started: float
    ended: float


class Decoded(Message, frozen=True):
    """All tokens of a request, the first from the prefill engine."""

    request: str
    tokens: list[int]


ToPrefill = Prompt | Stop
ToDecode = DecodeRequest | Stop
FromEngine = Ready | Failed | Prefilled | Released | Pulled | Decoded


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
