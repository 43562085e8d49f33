"""Whether a stream of server-sent events has said anything yet.

A server answers with status 200 before its engine has the request, so a failure is an event. In vLLM's chats it comes
after a chunk for each choice with nothing but its role; comments may stand before both, to keep the connection alive.
"""

import re
from enum import Enum, auto
from typing import Final

import msgspec

from kvd.router import limits
from kvd.router.engines import NULL, decode

ENDS: Final = (b"\r\n\r\n", b"\n\n", b"\r\r")
"""What may end an event."""
_END: Final = re.compile(b"|".join(ENDS))
_EMPTY: Final = {b'""', b"null", b"[]"}


class Said(Enum):
    """What a stream has said."""

    NOTHING = auto()
    """Which could not be said by another server as well."""
    SOMETHING = auto()
    ERROR = auto()


class Beginning:
    """The beginning of a stream, `held` until it says something."""

    def __init__(self) -> None:
        self.held = bytearray()
        self._read = 0
        self._events = 0

    def add(self, part: bytes) -> Said:
        """What the stream has said with `part`. A very long event is taken for something, as are very many."""
        searched = max(self._read, len(self.held) - 3)
        self.held += part
        while end := _END.search(self.held, searched):
            said = _said(bytes(self.held[self._read : end.start()]))
            if said is not Said.NOTHING:
                return said
            self._read = searched = end.end()
            self._events += 1
            if self._events == limits.HELD_EVENTS:
                return Said.SOMETHING
        return Said.NOTHING if len(self.held) < limits.HELD_BYTES else Said.SOMETHING


class Errors:
    """Errors in a stream that has said something already."""

    def __init__(self) -> None:
        self._begun = b""
        """The event that the network has cut."""

    def are_in(self, part: bytes) -> bool:
        """Whether an event that ends in this part of the stream says an error. A very long one does not."""
        events = self._begun + part
        begun = events[max(events.rfind(end) + len(end) if end in events else 0 for end in ENDS) :]
        self._begun = begun if len(begun) <= limits.ERROR_EVENT_BYTES else b""
        # Looked for first: hardly any part says it, and within a text the quotes are escaped.
        return b'"error"' in events and any(_said(event) is Said.ERROR for event in _END.split(events))


class _Choice(msgspec.Struct):
    delta: dict[str, msgspec.Raw] = {}
    finish_reason: msgspec.Raw = NULL

    def says_nothing(self) -> bool:
        others = [value for name, value in self.delta.items() if name != "role"]
        empty = all(bytes(value) in _EMPTY for value in (self.finish_reason, *others))
        return empty and "role" in self.delta


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    error: msgspec.Raw = NULL


def _said(event: bytes) -> Said:
    lines = [line[5:].removeprefix(b" ") for line in event.splitlines() if line.startswith(b"data:")]
    data = b"\n".join(lines)
    if data in {b"", b"[DONE]"}:
        return Said.NOTHING
    try:
        chunk: _Chunk = decode(data, _Chunk)
    except msgspec.DecodeError:
        return Said.SOMETHING
    if bytes(chunk.error) != bytes(NULL):
        return Said.ERROR
    opens = chunk.choices is not None and all(choice.says_nothing() for choice in chunk.choices)
    return Said.NOTHING if opens else Said.SOMETHING
