"""The decode side's half: says what it wants, and pulls it when the ticket comes. Runs on the transfers' thread.

A request has failed only when nothing can be written to its pages any more: not while its pull runs, nor while they are
in quarantine after it.
"""

import contextlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvd.client import Blocks, Cancelled, Done, Failed, Freed
from kvd.client.events import Event
from kvd.engines.kernels import Event as Kernels
from kvd.engines.sglang.handoff import FirstToken, Handoff
from kvd.engines.sglang.messages import Abandoned, Address, Message, Offered, Refused, Wanted
from kvd.engines.sglang.records import Records
from kvd.engines.sglang.spec import RECORDS
from kvd.errors import KvdError
from kvd.protocol import ticket as tickets


class DecodeEngine(Protocol):
    """What the engine hears of its rooms."""

    def pulling(self, room: int) -> None:
        """Its pages may be written to from now on."""

    def landed(self, room: int, record: int | FirstToken, aux_index: int) -> None:
        """Its pages are there; what belongs at `aux_index` of the engine's metadata is in `record`, or is told."""

    def failed(self, room: int, reason: str) -> None:
        """It has failed, and nothing writes to its pages."""

    def tell(self, engine: Address, message: Message) -> None:
        """Sends a message to a prefill engine."""

    def call_after(self, kernels: Kernels, call: Callable[[], None]) -> None:
        """Calls it on this thread once these have ended."""

    def cancel(self, pull: str) -> None:
        """Cancels a pull; its end comes as an event."""


@dataclass(slots=True)
class _Room:
    number: int
    sources: tuple[Address, ...]
    """The ranks of the prefill engine; none of one whose ticket was handed over with the request."""
    nonces: tuple[bytes, ...]
    """Of each source."""
    blocks: tuple[Blocks, ...]
    aux_index: int
    prompt: int = 0
    """Its checksum."""
    after: Kernels | None = None
    """Kernels that the engine had given to its GPU when it gave the pages: of an earlier request, they may write there
    still."""
    first: FirstToken | None = None
    """If it was handed over, too."""
    tickets: dict[bytes, str] = field(default_factory=dict, repr=False)
    """What the sources have offered, by nonce."""
    grows: bool = False
    """Whether the prompt is still computed while it is pulled."""
    pull: str = ""
    """Its name while it runs."""
    record: int = -1
    failure: str = ""
    ended: bool = False


class Consumer:
    """Over `client`, an attached worker of kvd. Prefill engines answer to `host` and `port`; times in seconds."""

    def __init__(
        self,
        client: Any,
        engine: DecodeEngine,
        host: str,
        port: int,
        *,
        pull_timeout: float,
        growing_timeout: float,
    ) -> None:
        self._client = client
        self._engine = engine
        self._here = host, port
        self._pull_timeout = pull_timeout
        self._growing_timeout = growing_timeout
        self._rooms: dict[int, _Room] = {}
        self._given_up: dict[int, str] = {}
        """Rooms that had failed before anything was wanted for them, and why."""
        self._pulls: dict[str, _Room] = {}
        self._records = Records()
        self._run = secrets.token_hex(4)
        self._names = 0

    # --- from the engine --------------------------------------------------------------------------------------------

    def want(
        self,
        number: int,
        sources: tuple[Address, ...],
        blocks: tuple[Blocks, ...],
        *,
        prefix: int,
        aux_index: int,
        prompt: int,
        after: Kernels | None = None,
    ) -> None:
        """The engine has `blocks` for what a prefill engine computes of a prompt with this checksum.

        `sources` are all ranks of that engine, in their order.
        """
        if number in self._given_up:
            self._engine.failed(number, self._given_up[number])
            return
        nonces = tuple(secrets.token_bytes(16) for _ in sources)
        self._rooms[number] = _Room(number, sources, nonces, blocks, aux_index, prompt, after)
        for source, nonce in zip(sources, nonces, strict=True):
            self._engine.tell(source, Wanted(number, nonce, prefix, *self._here, grows=True))

    def take(
        self,
        number: int,
        handoff: Handoff,
        blocks: tuple[Blocks, ...],
        *,
        aux_index: int,
        after: Kernels | None = None,
    ) -> None:
        """The engine has `blocks` for what another engine has computed."""
        if number in self._given_up:
            self._engine.failed(number, self._given_up[number])
            self.let_go(number, handoff.params.kvd_ticket)
            return
        room = _Room(number, (), (), blocks, aux_index, after=after, first=handoff.first)
        self._rooms[number] = room
        if handoff.first is None:
            self._records.take(lambda record: self._pull_with(room, handoff.params.kvd_ticket, record))
        else:
            self._pull(room, handoff.params.kvd_ticket, blocks)

    def let_go(self, number: int, ticket: str) -> None:
        """Has the daemon of who offered it hear that nobody here wants what the ticket names."""
        with contextlib.suppress(KvdError):  # the daemon is away: the offer ends with its time
            self._client.pull(
                self._name(number), ticket, blocks=(), timeout=self._pull_timeout, consumer=_consumer(number)
            )

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
            self._engine.cancel(room.pull)
        else:
            self._fail(room)

    def lost(self, number: int, reason: str) -> None:
        """The prefill engine does not answer: what it has offered may still be pulled, unless that is yet to grow."""
        room = self._rooms.get(number)
        if room is None or not room.pull or room.grows:
            self.abandon(number, reason)

    def forget(self, number: int) -> None:
        """The engine has no such request any more."""
        room = self._rooms.get(number)
        if room is not None:
            self.abandon(number, "the engine has dropped the request")  # unless it has ended
        self._rooms.pop(number, None)
        self._given_up.pop(number, None)

    # --- from elsewhere ---------------------------------------------------------------------------------------------

    def told(self, message: Message) -> None:
        """A prefill engine's message."""
        room = self._rooms.get(message.room)
        if room is None or message.nonce not in room.nonces or room.ended or room.failure:
            return
        match message:
            case Offered(prompt=prompt) if prompt != room.prompt:
                text = f"its prompt has the checksum {room.prompt}, the prefill engine's {prompt}"
                self.abandon(room.number, f"{text}: do the two have one tokenizer and one chat template?")
            case Offered(nonce=nonce, ticket=ticket) if nonce not in room.tickets:
                room.tickets[nonce] = ticket
                if len(room.tickets) == len(room.nonces):
                    self._join(room)
            case Refused(reason=reason) if not room.pull:  # else the pull will say
                self.abandon(room.number, f"the prefill engine does not send it: {reason}")
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

    def _name(self, number: int) -> str:
        self._names += 1
        return f"{number}#{self._run}.{self._names}"

    def _join(self, room: _Room) -> None:
        """All ranks have offered it."""
        try:
            ticket = tickets.join(room.tickets[nonce] for nonce in room.nonces)
        except KvdError as error:
            self.abandon(room.number, f"the tickets of the prefill engine's ranks do not fit each other: {error.text}")
        else:
            room.grows = tickets.decode(ticket).grows
            self._records.take(lambda record: self._pull_with(room, ticket, record))

    def _pull_with(self, room: _Room, ticket: str, record: int) -> None:
        room.record = record
        self._pull(room, ticket, (*room.blocks, Blocks(RECORDS, 0, [record])))

    def _pull(self, room: _Room, ticket: str, blocks: tuple[Blocks, ...]) -> None:
        try:
            may_write = room.after is not None and not room.after.query()
        except Exception as error:  # noqa: BLE001 - whatever torch raises of a GPU's context that is lost
            may_write = False
            if not room.failure:
                self.abandon(room.number, f"whether earlier kernels write to its pages is not known: {error!r}")
        if room.after is not None and may_write:
            self._engine.call_after(room.after, lambda: self._pull(room, ticket, blocks))
            return
        if room.failure:  # it was abandoned meanwhile
            self._records.give_back_of(room)
            self.let_go(room.number, ticket)
            return
        name, timeout = self._name(room.number), self._growing_timeout if room.grows else self._pull_timeout
        try:
            self._client.pull(name, ticket, blocks=blocks, timeout=timeout, consumer=_consumer(room.number))
        except KvdError as error:
            self._records.give_back_of(room)
            room.failure = f"it is not pulled: {error}"
            self._abandon(room)
            self._fail(room)
            return
        room.pull = name
        self._pulls[name] = room
        self._engine.pulling(room.number)

    def _done(self, room: _Room) -> None:
        room.pull = ""
        try:
            if room.failure:
                self._engine.failed(room.number, room.failure)
            else:
                self._engine.landed(room.number, room.record if room.first is None else room.first, room.aux_index)
            room.ended = True  # if that raises, it is yet to fail
        finally:
            self._records.give_back_of(room)

    def _ended(self, pull: str, *, quarantined: bool) -> None:
        if quarantined:
            return
        room = self._pulls.pop(pull)
        self._records.give_back_of(room)
        self._abandon(room)
        room.pull, room.failure = "", room.failure or "the pull was cancelled"
        self._fail(room)

    def _abandon(self, room: _Room) -> None:
        """Tells the prefill engine, so that it does not wait for its offer's time.

        Of what was handed over nobody is told: the daemons tell each other.
        """
        for source, nonce in zip(room.sources, room.nonces, strict=True):
            self._engine.tell(source, Abandoned(room.number, nonce, room.failure or "its pull has failed"))

    def _fail(self, room: _Room) -> None:
        room.ended = True
        self._engine.failed(room.number, room.failure)


def _consumer(number: int) -> str:
    """What producers count the ranks of this engine by: they know nothing else of a request that others do not have."""
    return f"room {number}"
