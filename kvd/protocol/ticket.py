"""Tickets: the JSON-safe description of an offer that travels with the request through the router.

A ticket is `kvd1.` and the URL-safe base64 of a msgpack array. One ticket names every rank of the producing engine;
`join` makes it from the tickets of single ranks. Its holder may claim what it names, and nothing else: each rank has a
secret that was drawn for this offer. Routers and workers do not look into it; daemons treat it as untrusted input.
"""

import base64
import binascii
import hashlib
from collections.abc import Iterable
from typing import Annotated

import msgspec
from msgspec import Meta

from kvd import limits
from kvd.errors import ErrorCode, refusal
from kvd.protocol.address import is_local
from kvd.protocol.types import Address, Count, Message, Name, RequestId, Secret, Spans

_PREFIX = "kvd1."
_STANDARD = bytes.maketrans(b"-_", b"+/")  # base64.urlsafe_b64decode builds this table for each ticket


class TicketRank(Message, frozen=True):
    """One rank of the producing engine: the daemon that holds its pool, and its offer there."""

    daemon: Name
    address: Address
    incarnation: Count
    pool: Name
    offer: RequestId
    blocks: Annotated[int, Meta(ge=0, lt=limits.MAX_RANKS)]
    """Index into the ticket's `blocks` of what this rank offered (the ranks of an engine usually share one entry)."""
    secret: Secret
    """The offer's."""
    generation: Count = 0
    """The lease's; `epoch` is the pool's. 0 if whoever made the ticket did not know them."""
    epoch: Count = 0
    stamp: Annotated[int, Meta(ge=0, le=limits.MAX_STAMPS)] = 0
    """Number of the daemon's word that has the lease's stamp, from 1; 0 if there is none."""


class Ticket(Message, frozen=True):
    """`tokens` is the length of the sequence; `blocks` has each distinct list of spans that the ranks offered."""

    tokens: Count
    ranks: Annotated[tuple[TicketRank, ...], Meta(min_length=1, max_length=limits.MAX_RANKS)]
    blocks: Annotated[tuple[Spans, ...], Meta(min_length=1, max_length=limits.MAX_RANKS)]
    grows: bool = False
    """Its offers grow: they are opened under their secrets, and what they hold is told with the claims. The ticket has
    no tokens and no spans, so that anybody who knows the secrets can make it before there is an offer."""

    def spans(self, rank: TicketRank) -> Spans:
        """The blocks that `rank` offered."""
        return self.blocks[rank.blocks]

    def proof(self, rank: TicketRank) -> bytes:
        """The proof that a claim of the offer of `rank` needs."""
        return proof(rank.secret, rank.pool, rank.offer, self.tokens, self.spans(rank))

    def encode(self) -> str:
        """The ticket as text.

        Raises:
            BadRequest: `BAD_TICKET`, a name in it is not Unicode, a number has more than 64 bits, or a value is of
                another type.

        """
        try:
            packed = _encoder.encode(self)
        except (UnicodeEncodeError, OverflowError, TypeError) as error:
            raise refusal(ErrorCode.BAD_TICKET, f"no ticket: {error}") from error
        return _PREFIX + base64.urlsafe_b64encode(packed).decode().rstrip("=")


class _Outline(Message, frozen=True):
    """A ticket that is not looked into."""

    tokens: msgspec.Raw
    ranks: msgspec.Raw
    blocks: Annotated[tuple[msgspec.Raw, ...], Meta(max_length=limits.MAX_RANKS)]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Ticket)
_outlines = msgspec.msgpack.Decoder(_Outline)
_FIX, _16, _32 = 0x90, 0xDC, 0xDD
"""How an array begins in msgpack: with its length in four bits, or before so many bits of it."""


def decode(text: str) -> Ticket:
    """Reads a ticket.

    Raises:
        BadRequest: `BAD_TICKET`, the text is a ticket of another version, or none.

    """
    if not text.startswith(_PREFIX):
        raise refusal(
            ErrorCode.BAD_TICKET,
            f"a ticket of this version starts with {_PREFIX!r}, this one with {text[:12]!r}; "
            "pass on what the offer returned, unchanged",
        )
    try:
        padded = text[len(_PREFIX) :] + "=" * (-(len(text) - len(_PREFIX)) % 4)
        packed = binascii.a2b_base64(padded.encode("ascii").translate(_STANDARD), strict_mode=True)
        if len(packed) > limits.MAX_TICKET_SPANS:
            _check_spans(packed)
        ticket = _decoder.decode(packed)
    except (binascii.Error, ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise refusal(ErrorCode.BAD_TICKET, f"the ticket cannot be read ({error}); was it cut short?") from error
    if ticket.grows and (ticket.tokens or any(ticket.blocks)):
        raise refusal(ErrorCode.BAD_TICKET, "the ticket is of an offer that grows, and names tokens or blocks")
    for rank in ticket.ranks:
        if rank.blocks >= len(ticket.blocks):
            raise refusal(
                ErrorCode.BAD_TICKET,
                f"rank {rank.pool!r} names block list {rank.blocks}, the ticket has {len(ticket.blocks)}",
            )
    return ticket


def _check_spans(packed: bytes) -> None:
    """Counts the spans of a long ticket before it makes them.

    Raises:
        BadRequest: `BAD_TICKET`, they are too many.
        msgspec.MsgspecError: it is no ticket.

    """
    spans = sum(_length(memoryview(each)) for each in _outlines.decode(packed).blocks)
    if spans > limits.MAX_TICKET_SPANS:
        text = f"the ticket has {spans} lists of block ids; at most {limits.MAX_TICKET_SPANS} are taken"
        raise refusal(ErrorCode.BAD_TICKET, text)


def _length(array: memoryview) -> int:
    """How many items it has; of what is no array any number, as the decoder refuses that."""
    if array[0] in (_16, _32):
        return int.from_bytes(array[1 : 3 if array[0] == _16 else 5], "big")
    return array[0] - _FIX if array[0] >= _FIX else 0


def growing(*, daemon: str, address: str, pool: str, offer: str, secret: bytes, incarnation: int = 0) -> str:
    """The ticket of an offer that grows, of one rank: whoever chose offer and secret can make it before it is opened.

    Raises:
        BadRequest: `BAD_TICKET`, a value does not fit.

    """
    return checked(Ticket(0, (TicketRank(daemon, address, incarnation, pool, offer, 0, secret),), ((),), grows=True))


def checked(ticket: Ticket) -> str:
    """The text of a ticket, which others can read.

    Raises:
        BadRequest: `BAD_TICKET`, a value does not fit.

    """
    text = ticket.encode()
    decode(text)
    return text


def join(texts: Iterable[str]) -> str:
    """Joins the tickets of an engine's ranks, in rank order, into one.

    Raises:
        BadRequest: `BAD_TICKET`, one cannot be read, they differ in `tokens`, some of their offers grow and others do
            not, two daemons claim one address, the ranks are on several hosts and one has an address that only its
            own host reaches, or all of them are more than one ticket may have.

    """
    tickets: list[Ticket] = []
    named = 0
    for text in texts:
        tickets.append(decode(text))
        named += len(tickets[-1].ranks)
        if named > limits.MAX_RANKS:  # before more of them are read
            said = f"tickets of one request name {named} ranks, a ticket has {limits.MAX_RANKS} at most"
            raise refusal(ErrorCode.BAD_TICKET, said)
    tokens, grows = {ticket.tokens for ticket in tickets}, {ticket.grows for ticket in tickets}
    if len(tokens) != 1:
        raise refusal(ErrorCode.BAD_TICKET, f"tickets of one request differ in tokens: {sorted(tokens)}")
    if len(grows) != 1:
        raise refusal(ErrorCode.BAD_TICKET, "some tickets of one request are of offers that grow, others are not")
    _check_addresses([rank for ticket in tickets for rank in ticket.ranks])
    blocks: dict[Spans, int] = {}
    ranks: list[TicketRank] = []
    for ticket in tickets:
        places: dict[int, int] = {}  # of its block lists: each is hashed once, however many ranks name it
        for rank in ticket.ranks:
            if rank.blocks not in places:
                places[rank.blocks] = blocks.setdefault(ticket.spans(rank), len(blocks))
            ranks.append(msgspec.structs.replace(rank, blocks=places[rank.blocks]))
    return checked(Ticket(tokens=tokens.pop(), ranks=tuple(ranks), blocks=tuple(blocks), grows=grows.pop()))


def _check_addresses(ranks: list[TicketRank]) -> None:
    local = [rank for rank in ranks if is_local(rank.address)]
    if local and len(local) < len(ranks):
        abroad = next(rank for rank in ranks if not is_local(rank.address))
        fix = f"start {local[0].daemon!r} with `listen` (or `advertise`) at an address that other hosts reach"
        text = f"the ranks are on several hosts: {abroad.daemon!r} at {abroad.address}, and {local[0].daemon!r} at"
        raise refusal(ErrorCode.BAD_TICKET, f"{text} {local[0].address}, which only its own host reaches; {fix}")
    named: dict[str, str] = {}
    for rank in ranks:
        other = named.setdefault(rank.address, rank.daemon)
        if other != rank.daemon:
            text = f"{other!r} and {rank.daemon!r} both say that they are at {rank.address}; give each its own `listen`"
            raise refusal(ErrorCode.BAD_TICKET, text)


def proof(secret: bytes, pool: str, offer: str, tokens: int, spans: Spans) -> bytes:
    """Proves knowledge of an offer's secret and blocks without revealing the secret.

    A keyed hash, 16 bytes, of the offer's name and content: a ticket that was changed on its way proves nothing.
    """
    content = _encoder.encode((pool, offer, tokens, spans))
    return hashlib.blake2b(content, key=secret, digest_size=limits.SECRET_BYTES, person=b"kvd proof").digest()


def stamp(secret: bytes, generation: int, proof: bytes, epoch: int) -> int:
    """The value of a lease's word while it is alive: 128 bits, never 0.

    The upper half is a hash of the lease's secret, generation and content. The lower half is its pool's `epoch`: a
    worker chooses its own secrets, and may find one whose hash is that of a made-up ticket, but not for another's pool.
    """
    content = generation.to_bytes(8, "little") + proof
    hashed = hashlib.blake2b(content, key=secret, digest_size=8, person=b"kvd stamp").digest()
    return (int.from_bytes(hashed, "little") or 1) << 64 | epoch
