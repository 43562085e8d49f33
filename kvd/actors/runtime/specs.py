"""Reads specs beside the loop: those that come with attaches, and those in peers' welcomes."""

from collections.abc import Callable
from functools import partial

from kvd.actors.runtime.actor import Actor, Background
from kvd.errors import ErrorCode, KvdError, refusal
from kvd.layout import CacheSpec
from kvd.net.priority_slots import PrioritySlots

Then = Callable[[CacheSpec | KvdError], None]


class SpecReader:
    """One spec at a time, and parties take turns: a long one takes up to 35 ms of a thread.

    Each is for a connection, which has one at a time. `kept` specs are kept decoded, those that were read last.
    """

    def __init__(self, background: Background, actor: Actor, kept: int = 0) -> None:
        self._background = background
        self._actor = actor
        self._kept = kept
        self._known: dict[bytes, CacheSpec] = {}
        self._slots: PrioritySlots[int] = PrioritySlots(1)
        """Connections: one whose spec is being read, and those that wait for that."""
        self._wanted: dict[int, tuple[bytes, Then]] = {}

    def __contains__(self, connection: int) -> bool:
        return connection in self._wanted

    def known(self, spec: bytes) -> CacheSpec | None:
        """A spec that need not be read."""
        return self._known.get(spec)

    def read(self, connection: int, party: str, spec: bytes, then: Then) -> None:
        """Calls `then` with a spec, or with what is wrong about it."""
        self._wanted[connection] = spec, then
        if self._slots.enter(connection, (party,)):
            self._start_first(connection)

    def forget(self, connection: int) -> None:
        """If a connection's spec waits to be read, `then` is called with an error instead."""
        if self._slots.waits(connection):
            self._slots.forget(connection)
            _, then = self._wanted.pop(connection)
            then(refusal(ErrorCode.CANCELLED, "the connection has ended"))

    def _start_first(self, connection: int | None) -> None:
        """Starts the first of these who can be: this one, and those that wait."""
        while connection is not None:
            try:
                self._start(connection)
            except Exception as error:  # noqa: BLE001 - whatever it is, those who wait need the slot
                _, then = self._wanted.pop(connection)
                self._slots.leave(connection)
                text = f"its spec cannot be read: internal {type(error).__name__}: {error}"
                self._actor.call(then, refusal(ErrorCode.INTERNAL, text))
                connection = self._slots.next()
            else:
                return

    def _start(self, connection: int) -> None:
        spec, _ = self._wanted[connection]
        known = self.known(spec)
        if known is not None:  # since it waits
            self._actor.call(self._end, connection, known)
        else:
            work = partial(CacheSpec.decode, spec)
            self._background(work, lambda result: self._actor.call(self._end, connection, result))

    def _end(self, connection: int, result: CacheSpec | KvdError) -> None:
        """Starts the next one first: what the caller does now goes behind those that wait, and may raise."""
        spec, then = self._wanted.pop(connection)
        if isinstance(result, CacheSpec):
            self._known[spec] = result
            if len(self._known) > self._kept:
                del self._known[next(iter(self._known))]
        self._slots.leave(connection)
        self._start_first(self._slots.next())
        then(result)
