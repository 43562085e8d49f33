"""The prefill side's half: offers what was computed, once the decode side wants it. Runs on the transfers' thread.

Whichever comes first, the engine's request (`expect`) or the decode side's message (`wanted`), waits for the other. If
a prompt is computed in several chunks, its offer is opened with the first one, grows (`extend`), and is closed with the
last (`send`), which brings the record; else one offer is made at the end. It ends when it has been read.

A request that is aborted after its last chunk has failed only when its offer is withdrawn: until then its pages are not
the engine's. Before that they are at once: of an offer that is never closed nothing counts that was read.
"""

import contextlib
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvd.client import Blocks, NotExtended, OfferRefused, Released
from kvd.client.events import Event
from kvd.engines.sglang.control import MAX_ENGINES
from kvd.engines.sglang.messages import Abandoned, Address, Message, Offered, Refused, Wanted
from kvd.engines.sglang.records import Records
from kvd.engines.sglang.spec import PAGES, RECORDS
from kvd.errors import KvdError
from kvd.limits import MAX_PARTS_PER_OFFER, MAX_RANKS, MAX_UNEXPECTED_ROOMS, SECRET_BYTES


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

    def tell(self, engine: Address, message: Message) -> None:
        """Sends a message to a decode engine."""

    def cancel(self, offer: str) -> None:
        """Cancels an offer; its end comes as an event."""


@dataclass(slots=True)
class _Room:
    targets: dict[Address, Wanted] = field(default_factory=dict)
    """The ranks of the decode engine that want it."""
    expected: bool = False
    """Whether the engine has the request."""
    sent: bool = False
    """Whether all of it is computed."""
    grows: bool = False
    """Whether its offer is one that grows, as those of all ranks then are: tickets of two kinds do not join."""
    named: int = 0
    """How many of its pages are named in an offer that grows."""
    parts: int = 0
    """And in how many parts."""
    offer: str = ""
    """Its name while it stands."""
    whole: bool = False
    """Whether it was offered to its end."""
    ticket: str = field(default="", repr=False)
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
        self._unexpected: dict[int, int] = {}
        """Rooms that the engine has not got, the oldest first, and how many want each."""
        self._early = 0
        """How many want any of those."""
        self._offers: dict[str, tuple[int, _Room]] = {}
        self._places: dict[Address, None] = {}
        """Where decode engines are that wanted what this engine had, the last of them last: others get no word."""
        self._records = Records()
        self._run = secrets.token_hex(4)
        self._names = 0

    # --- from the engine --------------------------------------------------------------------------------------------

    def expect(self, number: int) -> None:
        """The engine has a request of this room."""
        room = self._rooms.setdefault(number, _Room())
        room.expected = True
        self._early -= self._unexpected.pop(number, 0)
        if room.failure:
            self._know(room.targets)
            self._fail(number, room, room.failure)
        elif room.targets:
            self._ready(number, room)

    def begin(self, number: int, prompt: int) -> None:
        """The prompt, of this checksum, is sent in parts: its offer is one that grows, if who wants it takes one."""
        room = self._rooms.get(number)
        if room is None or room.failure or not room.targets or room.grows:
            return
        room.prompt, room.grows = prompt, all(target.grows for target in room.targets.values())
        if room.grows:
            with contextlib.suppress(KvdError):  # the daemon is away: with a later part
                self._open(number, room)

    def extend(self, number: int, pages: list[int], *, tokens: int, first: int) -> None:
        """The first `tokens` tokens of a prompt that was begun are computed: `pages` are those from `first` on.

        Nothing writes to these pages any more.
        """
        room = self._rooms.get(number)
        if room is None or room.failure or not room.grows:
            return
        try:
            self._open(number, room)
        except KvdError:
            return  # the daemon is away: what is computed comes with a later part
        if room.parts == MAX_PARTS_PER_OFFER:
            return  # what follows comes with the last chunk
        try:
            self._client.extend_offer(room.offer, tokens=tokens, blocks=_rest(room, pages, first))
        except KvdError as error:
            self._end(number, room, f"it is not offered: {error}")
            return
        room.named, room.parts = len(pages), room.parts + 1

    def send(self, number: int, pages: list[int], *, tokens: int, first: int, aux_index: int, prompt: int) -> None:
        """The prompt of `tokens` tokens and checksum `prompt` is computed: `pages` are those from `first` on."""
        room = self._rooms.get(number)
        if room is None or room.failure:
            return  # the engine has been told
        room.sent = True

        def offer(record: int) -> None:
            if self._rooms.get(number) is not room:  # the engine has dropped it meanwhile
                self._records.give_back(record)
                return
            if room.failure or not room.targets:
                self._records.give_back(record)
                self._fail(number, room, room.failure or "no decode engine wants it")
                return
            room.record = record
            self._engine.fill(record, aux_index)
            blocks = (*_rest(room, pages, first), Blocks(RECORDS, 0, [record]))
            if room.grows:
                self._close(number, room, blocks, tokens, prompt)
            else:
                self._offer(number, room, blocks, tokens, prompt)

        self._records.take(offer)

    def abandon(self, number: int, reason: str) -> None:
        """The engine does not want to send it any more."""
        room = self._rooms.get(number)
        if room is not None:
            self._end(number, room, reason)

    def forget(self, number: int, reason: str = "the prefill engine has dropped the request") -> None:
        """The engine has no such request any more."""
        room = self._rooms.pop(number, None)
        self._early -= self._unexpected.pop(number, 0)
        if room is not None and not room.sent:
            room.expected = False
            self._end(number, room, reason)

    # --- from elsewhere ---------------------------------------------------------------------------------------------

    def told(self, message: Message) -> None:
        """A decode engine's message."""
        match message:
            case Wanted(number):
                self._wanted(number, message)
            case Abandoned(number, nonce, reason):
                room = self._rooms.get(number)
                if room is not None and any(target.nonce == nonce for target in room.targets.values()):
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
            case NotExtended(name, code, text) if name in self._offers:
                self._end(*self._offers[name], f"the offer was not extended: {code}: {text}")
            case _:
                pass

    # --- inside -----------------------------------------------------------------------------------------------------

    def _wanted(self, number: int, message: Wanted) -> None:
        room, place = self._rooms.setdefault(number, _Room()), (message.host, message.port)
        if room.failure and not room.expected and all(message.nonce != each.nonce for each in room.targets.values()):
            self.forget(number)  # of an attempt that was over before the engine had it; this is another one
            room = self._rooms[number] = _Room()
        is_new = place not in room.targets
        if is_new and len(room.targets) == MAX_RANKS:
            return
        room.targets[place] = message
        if not room.expected:
            self._unexpected[number] = self._unexpected.get(number, 0) + is_new
            self._early += is_new
            while self._early > MAX_UNEXPECTED_ROOMS:
                self.forget(next(iter(self._unexpected)))
            return
        self._know((place,))
        if room.failure:
            self._refuse(room, room.failure)
        elif room.ticket:
            self._tell(number, room, place, message)
        elif not room.sent:
            self._ready(number, room)

    def _ready(self, number: int, room: _Room) -> None:
        """Ranks of the decode engine have the same tokens; what one of them lacks, is sent to all."""
        self._know(room.targets)
        self._engine.ready(number, min(target.prefix for target in room.targets.values()))

    def _know(self, places: Iterable[Address]) -> None:
        """What wants a room that the engine has, is an engine; each restart of one is another."""
        for place in places:
            self._places.pop(place, None)
            self._places[place] = None
        while len(self._places) > MAX_ENGINES:
            del self._places[next(iter(self._places))]

    def _open(self, number: int, room: _Room) -> None:
        """Opens an offer that grows, unless one is open."""
        if room.offer:
            return
        name, secret = self._drawn(number)
        self._client.open_offer_nowait(name, ttl=self._offer_ttl, secret=secret)
        self._offered(number, room, name, self._client.growing_ticket(name, secret))

    def _offer(self, number: int, room: _Room, blocks: tuple[Blocks, ...], tokens: int, prompt: int) -> None:
        name, secret = self._drawn(number)
        try:
            self._client.offer_nowait(name, tokens=tokens, blocks=blocks, ttl=self._offer_ttl, secret=secret)
        except KvdError as error:
            self._refused(number, room, f"it is not offered: {error}")
            return
        room.prompt, room.whole = prompt, True
        self._offered(number, room, name, self._client.ticket(name, tokens, blocks, secret))

    def _close(self, number: int, room: _Room, blocks: tuple[Blocks, ...], tokens: int, prompt: int) -> None:
        if prompt != room.prompt:  # the decode side was told of another
            self._refused(number, room, f"only {tokens} tokens of the prompt are computed")
            return
        try:
            self._open(number, room)
            self._client.close_offer(room.offer, tokens=tokens, blocks=blocks)
        except KvdError as error:
            self._refused(number, room, f"it is not offered: {error}")
        else:
            room.whole = True

    def _refused(self, number: int, room: _Room, reason: str) -> None:
        """Its end cannot be offered: it has failed, if any of it was offered as soon as that has ended."""
        if room.offer:
            self._end(number, room, reason)
            return
        self._records.give_back_of(room)
        self._fail(number, room, reason)

    def _drawn(self, number: int) -> tuple[str, bytes]:
        """Name and secret of another offer."""
        self._names += 1
        return f"{number}#{self._run}.{self._names}", secrets.token_bytes(SECRET_BYTES)

    def _offered(self, number: int, room: _Room, name: str, ticket: str) -> None:
        room.offer, room.ticket = name, ticket
        self._offers[name] = number, room
        for place, target in room.targets.items():
            self._tell(number, room, place, target)

    def _tell(self, number: int, room: _Room, place: Address, target: Wanted) -> None:
        self._engine.tell(place, Offered(number, target.nonce, room.ticket, room.prompt))

    def _end(self, number: int, room: _Room, reason: str) -> None:
        """Fails; if its offer may count, as soon as that has ended."""
        if room.failure:
            return
        if room.sent:
            room.failure = reason
        else:
            self._fail(number, room, reason)
        if room.offer:
            self._engine.cancel(room.offer)

    def _ended(self, name: str, failure: str) -> None:
        number, room = self._offers.pop(name)
        room.offer = ""
        self._records.give_back_of(room)
        left = "" if room.whole else "the decode engine has left it before all of it was offered"
        failure = failure or left
        if not room.sent:
            self._end(number, room, failure)
        elif failure or room.failure:
            self._fail(number, room, room.failure or failure)
        else:
            self._engine.sent(number)

    def _fail(self, number: int, room: _Room, reason: str) -> None:
        room.failure = reason
        self._refuse(room, reason)
        if room.expected:
            self._engine.failed(number, reason)

    def _refuse(self, room: _Room, reason: str) -> None:
        for place, target in room.targets.items():
            if place in self._places:
                self._engine.tell(place, Refused(target.room, target.nonce, reason))


def _rest(room: _Room, pages: list[int], first: int) -> tuple[Blocks, ...]:
    """The blocks of `pages`, from `first` on, that the room's offer does not name yet."""
    rest = pages[room.named :]
    return (Blocks(PAGES, first + room.named, rest),) if rest else ()
