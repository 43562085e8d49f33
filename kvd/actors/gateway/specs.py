"""Reads the specs that come with attaches, beside the loop."""

from collections.abc import Callable
from functools import partial

from kvd.actors.runtime.actor import Actor, Background
from kvd.errors import ErrorCode, KvdError, refusal
from kvd.layout import CacheSpec
from kvd.net.priority_slots import PrioritySlots


class SpecReader:
    """One spec at a time, and users take turns: reading a long one takes tens of milliseconds of a thread."""

    def __init__(self, background: Background, actor: Actor) -> None:
        self._background = background
        self._actor = actor
        self._slots: PrioritySlots[int] = PrioritySlots(1)
        """Connections: one whose spec is being read, and those that wait for that."""
        self._specs: dict[int, tuple[bytes, Callable[[CacheSpec | KvdError], None]]] = {}

    def read(self, connection: int, uid: int, spec: bytes, then: Callable[[CacheSpec | KvdError], None]) -> None:
        """Calls `then` with the spec of a connection of this user, or with what is wrong about it."""
        self._specs[connection] = spec, then
        if self._slots.enter(connection, (str(uid),)):
            self._start(connection)

    def closed(self, connection: int) -> None:
        """A connection is gone: if its spec waits to be read, `then` is called with an error instead."""
        if self._slots.waits(connection):
            self._slots.forget(connection)
            _, then = self._specs.pop(connection)
            then(refusal(ErrorCode.CANCELLED, "the session has closed"))

    def _start(self, connection: int) -> None:
        spec, _ = self._specs[connection]
        work = partial(CacheSpec.decode, spec)
        self._background(work, lambda result: self._actor.call(self._end, connection, result))

    def _end(self, connection: int, result: CacheSpec | KvdError) -> None:
        self._slots.leave(connection)
        _, then = self._specs.pop(connection)
        if (other := self._slots.next()) is not None:
            self._start(other)
        then(result)
