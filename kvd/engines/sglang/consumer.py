"""The decode side's half: says what it wants, and pulls it when the ticket comes. Runs on the transfers' thread.

A request has failed only when nothing can be written to its pages any more: not while its pull runs, nor while they are
in quarantine after it.
"""

import contextlib
import secrets
from dataclasses import dataclass
from typing import Any, Protocol

from kvd.client import Blocks, Cancelled, Done, Failed, Freed
from kvd.client.events import Event
from kvd.engines.sglang.messages import Abandoned, Message, Offered, Refused, Wanted
from kvd.engines.sglang.records import Records
from kvd.engines.sglang.spec import PAGES, RECORDS
from kvd.errors import KvdError


class DecodeEngine(Protocol):
    """What the engine hears of its rooms."""

    def pulling(self, room: int) -> None:
        """Its pages may be written to from now on."""

    def landed(self, room: int, record: int, aux_index: int) -> None:
        """Its pages are there, and in `record` what belongs at `aux_index` of the engine's metadata."""

    def failed(self, room: int, reason: str) -> None:
        """It has failed, and nothing writes to its pages."""

    def tell(self, host: str, port: int, message: Message) -> None:
        """Sends a message to a prefill engine."""


@dataclass(slots=True)
class _Room:
    number: int
    nonce: bytes
    source: tuple[str, int]
    blocks: tuple[Blocks, ...]
    aux_index: int
    offered: bool = False
    pull: str = ""
    """Its name while it runs."""
    record: int = -1
    failure: str = ""
    ended: bool = False


class Consumer:
    """Over `client`, an attached worker of kvd. Prefill engines answer to `host` and `port`."""

    def __init__(self, client: Any, engine: DecodeEngine, host: str, port: int, *, pull_timeout: float) -> None:
        self._client = client
        self._engine = engine
        self._here = host, port
        self._pull_timeout = pull_timeout
        self._rooms: dict[int, _Room] = {}
        self._given_up: dict[int, str] = {}
        """Rooms that had failed before anything was wanted for them, and why."""
        self._pulls: dict[str, _Room] = {}
        self._records = Records()
        self._run = secrets.token_hex(4)
        self._names = 0

    # --- from the engine --------------------------------------------------------------------------------------------

    def want(
        self, number: int, source: tuple[str, int], pages: list[int], *, first: int, prefix: int, aux_index: int
    ) -> None:
        """The engine has `pages` for what the prefill engine at `source` computes, from position `first` on."""
        if number in self._given_up:
            self._engine.failed(number, self._given_up[number])
            return
        blocks = (Blocks(PAGES, first, pages),) if pages else ()
        room = _Room(number, secrets.token_bytes(16), source, blocks, aux_index)
        self._rooms[number] = room
        self._engine.tell(*source, Wanted(number, room.nonce, prefix, *self._here))

    def abandon(self, number: int, reason: str) -> None:
        """The engine does not want it any more, nor what it may say that it wants from now on."""
        room = self._rooms.get(number)
        if room is None:
            self._given_up[number] = reason
            self._engine.failed(number, reason)
            return
        if room.ended or room.failure:
            return
        room.failure = reason
        self._abandon(room)
        if room.pull:
            with contextlib.suppress(KvdError):  # the daemon is away: the pull ends with its time, or with the daemon
                self._client.cancel(room.pull)
        else:
            self._fail(room)

    def lost(self, number: int, reason: str) -> None:
        """The prefill engine is gone: what it has offered may still be pulled."""
        room = self._rooms.get(number)
        if room is None or not room.pull:
            self.abandon(number, reason)

    def forget(self, number: int) -> None:
        """The engine has no such request any more."""
        self._rooms.pop(number, None)
        self._given_up.pop(number, None)

    # --- from elsewhere ---------------------------------------------------------------------------------------------

    def told(self, message: Message) -> None:
        """A prefill engine's message."""
        room = self._rooms.get(message.room)
        if room is None or room.nonce != message.nonce or room.ended or room.failure:
            return
        match message:
            case Offered(ticket=ticket) if not room.offered:
                room.offered = True
                self._records.take(lambda record: self._pull(room, ticket, record))
            case Refused(reason=reason) if not room.pull:  # else the pull will say
                room.failure = f"the prefill engine does not send it: {reason}"
                self._fail(room)
            case _:
                pass  # for a prefill engine

    def on_event(self, event: Event) -> None:
        """The daemon's event."""
        match event:
            case Done(pull) if pull in self._pulls:
                self._done(self._pulls.pop(pull))
            case Failed(pull, code, text, quarantined) if pull in self._pulls:
                room = self._pulls[pull]
                room.failure = room.failure or f"{code}: {text}"
                self._ended(pull, quarantined=quarantined)
            case Cancelled(pull, quarantined) if pull in self._pulls:
                self._ended(pull, quarantined=quarantined)
            case Freed(pull) if pull in self._pulls:
                self._ended(pull, quarantined=False)
            case _:
                pass

    # --- inside -----------------------------------------------------------------------------------------------------

    def _pull(self, room: _Room, ticket: str, record: int) -> None:
        if room.failure:
            self._records.give_back(record)
            return
        self._names += 1
        name = f"{room.number}#{self._run}.{self._names}"
        try:
            blocks = (*room.blocks, Blocks(RECORDS, 0, [record]))
            self._client.pull(name, ticket, blocks=blocks, timeout=self._pull_timeout)
        except KvdError as error:
            self._records.give_back(record)
            room.failure = f"it is not pulled: {error}"
            self._abandon(room)
            self._fail(room)
            return
        room.pull, room.record = name, record
        self._pulls[name] = room
        self._engine.pulling(room.number)

    def _done(self, room: _Room) -> None:
        room.pull, room.ended = "", True
        if room.failure:
            self._engine.failed(room.number, room.failure)
        else:
            self._engine.landed(room.number, room.record, room.aux_index)
        self._records.give_back(room.record)

    def _ended(self, pull: str, *, quarantined: bool) -> None:
        if quarantined:
            return
        room = self._pulls.pop(pull)
        self._records.give_back(room.record)
        self._abandon(room)
        room.pull, room.failure = "", room.failure or "the pull was cancelled"
        self._fail(room)

    def _abandon(self, room: _Room) -> None:
        """Tells the prefill engine, so that it does not wait for its offer's time."""
        self._engine.tell(*room.source, Abandoned(room.number, room.nonce, room.failure or "its pull has failed"))

    def _fail(self, room: _Room) -> None:
        room.ended = True
        self._engine.failed(room.number, room.failure)
