"""The prefill side's half: offers what was computed, once the decode side wants it. Runs on the transfers' thread.

Whichever comes first, the engine's request (`expect`) or the decode side's message (`wanted`), waits for the other. One
offer is made when the whole prompt is computed (`send`). It ends when it has been read; a request that is aborted
before that has failed only when its offer is withdrawn: until then its pages are not the engine's.
"""

import contextlib
import secrets
from dataclasses import dataclass
from typing import Any, Protocol

from kvd.client import Blocks, OfferRefused, Released
from kvd.client.events import Event
from kvd.engines.sglang.messages import Abandoned, Message, Offered, Refused, Wanted
from kvd.engines.sglang.records import Records
from kvd.engines.sglang.spec import PAGES, RECORDS
from kvd.errors import KvdError
from kvd.limits import MAX_UNEXPECTED_ROOMS, SECRET_BYTES


class PrefillEngine(Protocol):
    """What the engine hears; all but `tell` end a room's wait."""

    def ready(self, room: int, prefix: int) -> None:
        """The decode side wants it, but for its first tokens."""

    def sent(self, room: int) -> None:
        """The decode side has it; the pages are the engine's again."""

    def failed(self, room: int, reason: str) -> None:
        """It has failed; the pages are the engine's again."""

    def fill(self, record: int, aux_index: int) -> None:
        """Copies what is at `aux_index` of the engine's metadata into a record."""

    def tell(self, host: str, port: int, message: Message) -> None:
        """Sends a message to a decode engine."""


@dataclass(slots=True)
class _Room:
    target: Wanted | None = None
    expected: bool = False
    """Whether the engine has the request."""
    sent: bool = False
    offer: str = ""
    """Its name while it stands."""
    record: int = -1
    prompt: int = 0
    """Its checksum."""
    failure: str = ""


class Producer:
    """Over `client`, an attached worker of kvd."""

    def __init__(self, client: Any, engine: PrefillEngine, *, offer_ttl: float) -> None:
        self._client = client
        self._engine = engine
        self._offer_ttl = offer_ttl
        self._rooms: dict[int, _Room] = {}
        self._unexpected: dict[int, None] = {}
        """Rooms that the engine has not got, the oldest first."""
        self._offers: dict[str, tuple[int, _Room]] = {}
        self._places: set[tuple[str, int]] = set()
        """Where decode engines are that wanted what this engine had: others get no word, which takes a socket each."""
        self._records = Records()
        self._run = secrets.token_hex(4)
        self._names = 0

    # --- from the engine --------------------------------------------------------------------------------------------

    def expect(self, number: int) -> None:
        """The engine has a request of this room."""
        room = self._rooms.setdefault(number, _Room())
        room.expected = True
        self._unexpected.pop(number, None)
        if room.failure:
            self._engine.failed(number, room.failure)
        elif room.target is not None:
            self._ready(number, room.target)

    def send(self, number: int, pages: list[int], *, tokens: int, first: int, aux_index: int, prompt: int) -> None:
        """The prompt of `tokens` tokens and checksum `prompt` is computed: `pages` are those from `first` on."""
        room = self._rooms[number]
        room.sent = True
        blocks = (Blocks(PAGES, first, pages),) if pages else ()

        def offer(record: int) -> None:
            if room.failure or room.target is None:
                self._records.give_back(record)
                self._fail(number, room, room.failure or "no decode engine wants it")
            else:
                room.record = record
                self._engine.fill(record, aux_index)
                room.prompt = prompt
                self._offer(number, room, (*blocks, Blocks(RECORDS, 0, [record])), tokens)

        self._records.take(offer)

    def abandon(self, number: int, reason: str) -> None:
        """The engine does not want to send it any more."""
        room = self._rooms.get(number)
        if room is not None:
            self._end(number, room, reason)

    def forget(self, number: int) -> None:
        """The engine has no such request any more."""
        room = self._rooms.pop(number, None)
        self._unexpected.pop(number, None)
        if room is not None and not room.sent and not room.failure:
            self._refuse(room, "the prefill engine has dropped the request")

    # --- from elsewhere ---------------------------------------------------------------------------------------------

    def told(self, message: Message) -> None:
        """A decode engine's message."""
        match message:
            case Wanted(number):
                self._wanted(number, message)
            case Abandoned(number, nonce, reason):
                room = self._rooms.get(number)
                if room is not None and room.target is not None and room.target.nonce == nonce:
                    self._end(number, room, f"the decode engine has abandoned it: {reason}")
            case _:
                pass  # for a decode engine

    def on_event(self, event: Event) -> None:
        """The daemon's event."""
        match event:
            case Released(name, reason):
                self._ended(name, "" if reason == "read" else f"the offer has ended unread ({reason})")
            case OfferRefused(name, code, text):
                self._ended(name, f"the offer was refused: {code}: {text}")
            case _:
                pass

    # --- inside -----------------------------------------------------------------------------------------------------

    def _wanted(self, number: int, message: Wanted) -> None:
        room = self._rooms.setdefault(number, _Room())
        if room.sent:
            return
        room.target = message
        if room.expected:
            self._ready(number, message)
            return
        self._unexpected[number] = None
        if len(self._unexpected) > MAX_UNEXPECTED_ROOMS:
            self.forget(next(iter(self._unexpected)))

    def _ready(self, number: int, target: Wanted) -> None:
        self._places.add((target.host, target.port))
        self._engine.ready(number, target.prefix)

    def _offer(self, number: int, room: _Room, blocks: tuple[Blocks, ...], tokens: int) -> None:
        assert room.target is not None  # noqa: S101 - `send` has looked
        self._names += 1
        name, secret = f"{number}#{self._run}.{self._names}", secrets.token_bytes(SECRET_BYTES)
        try:
            self._client.offer_nowait(name, tokens=tokens, blocks=blocks, ttl=self._offer_ttl, secret=secret)
        except KvdError as error:
            self._records.give_back(room.record)
            self._fail(number, room, f"it is not offered: {error}")
            return
        room.offer = name
        self._offers[name] = number, room
        ticket = self._client.ticket(name, tokens, blocks, secret)
        self._engine.tell(room.target.host, room.target.port, Offered(number, room.target.nonce, ticket, room.prompt))

    def _end(self, number: int, room: _Room, reason: str) -> None:
        """Fails now, or if there is an offer, as soon as it has ended."""
        if room.failure:
            return
        if not room.sent:
            self._fail(number, room, reason)
            return
        room.failure = reason
        if room.offer:
            with contextlib.suppress(KvdError):  # the daemon is away: the offer ends with its time, or with the daemon
                self._client.cancel(room.offer)

    def _ended(self, name: str, failure: str) -> None:
        number, room = self._offers.pop(name)
        self._records.give_back(room.record)
        room.offer = ""
        if failure or room.failure:
            self._fail(number, room, room.failure or failure)
        else:
            self._engine.sent(number)

    def _fail(self, number: int, room: _Room, reason: str) -> None:
        room.failure = reason
        self._refuse(room, reason)
        if room.expected:
            self._engine.failed(number, reason)

    def _refuse(self, room: _Room, reason: str) -> None:
        target = room.target
        if target is not None and (target.host, target.port) in self._places:
            self._engine.tell(target.host, target.port, Refused(target.room, target.nonce, reason))
