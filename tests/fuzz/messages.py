"""What attackers send: garbled frames, and well-formed messages whose contents nobody honest would send.

Everything is drawn from dice that the caller seeds, so that a seed gives the same messages again.
"""

import json
import re
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import msgspec
from msgspec import inspect

from kvd.protocol import peer, ticket, worker
from kvd.protocol.types import Message

GOLDEN = Path(__file__).parents[2] / "protos" / "golden.json"
SESSION, REQUESTS, REPLIES = worker.SessionRequest, worker.Request, worker.Reply
PEER_REQUESTS, ANSWERS = peer.PeerRequest, peer.PeerReply
TEXTS = (
    "a",
    "w",
    "evil",
    "decode.0",
    "x" * 64,
    "x" * 128,
    "..",
    "a/../b",
    "a@b:1",
    "name\n",
    "",
    "é",
    "\x00",
    "x" * 3000,
)
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
FLOATS = (0.0, -0.0, 1e-300, 0.001, 1.0, 3600.0, 3600.1, -1.0, float("inf"), float("-inf"), float("nan"), 1e308)
LONG = 1 << 16


@cache
def golden() -> tuple[bytes, ...]:
    """The frames that `protos/` shows to other languages."""
    return tuple(bytes.fromhex(entry["hex"]) for entry in json.loads(GOLDEN.read_text()))


def garbled(rng: Random, seeds: tuple[bytes, ...] | list[bytes]) -> bytes:
    """A message as it is, cut, with bytes changed, inserted or repeated, joined to another, or plain noise."""
    frame = bytearray(rng.choice(seeds))
    kind = rng.randrange(7)
    if kind == 1:
        del frame[rng.randrange(len(frame)) :]
    elif kind in (2, 3):
        for _ in range(rng.randint(1, 4)):
            frame[rng.randrange(len(frame))] = rng.randrange(256)
    elif kind == 4:
        at = rng.randrange(len(frame))
        frame[at:at] = rng.randbytes(rng.randint(1, 9))
    elif kind == 5:
        frame += rng.choice(seeds)
    elif kind == 6:
        frame = bytearray(rng.randbytes(rng.randrange(64)))
    return bytes(frame)


def compose(kind: type[Message], **fields: Any) -> bytes:
    """A frame of `kind` with these fields; others have their default, or a plain value of their type."""
    return msgspec.msgpack.encode(build(kind, **fields))


def build(kind: type[Message], **fields: Any) -> Any:
    """As `compose`, the message itself: fields that the protocol gains later need no change here."""
    shape = _shape(kind)
    assert isinstance(shape, inspect.StructType)
    dice = Random(0)  # noqa: S311 - dice, not secrets
    missing = {field.name: _draw(field.type, dice, 0.0) for field in shape.fields if field.required}
    return kind(**{**missing, **fields})


def odd(dice: Random, kind: Any) -> bytes:
    """A frame of `kind` (a message or a union of them) whose values lie at their bounds, or a little beyond."""
    try:
        return msgspec.msgpack.encode(_draw(_shape(kind), dice, dice.choice((0.0, 0.02, 0.2))))
    except OverflowError:  # an integer that msgpack has no room for
        return b"\xcf" + b"\xff" * 8


@cache
def _shape(kind: Any) -> inspect.Type:
    return inspect.type_info(kind)


def _draw(shape: inspect.Type, dice: Random, wild: float) -> Any:  # noqa: PLR0911 - a case for each kind of value
    """A value of `shape`, of any other type with probability `wild`."""
    if wild and dice.random() < wild:
        return dice.choice((None, True, -1, 1 << 64, 2.5, "text", b"bytes", [], {}, [[[[]]]], {"a": 1}))
    match shape:
        case inspect.UnionType(types):
            return _draw(dice.choice(types), dice, wild)
        case inspect.StructType():
            head = [] if shape.tag is None else [shape.tag]
            return [*head, *(_draw(field.type, dice, wild) for field in shape.fields)]
        case inspect.IntType():
            return _integer(shape, dice, wild)
        case inspect.FloatType():
            return dice.choice(FLOATS) if wild else 1.0
        case inspect.StrType():
            return _text(shape, dice, wild)
        case inspect.BytesType():
            return dice.randbytes(_length(shape, dice, wild))
        case inspect.VarTupleType():
            return [_draw(shape.item_type, dice, wild) for _ in range(min(8, _length(shape, dice, wild)))]
        case inspect.BoolType():
            return dice.random() < 0.5
    return None


def _integer(shape: inspect.IntType, dice: Random, wild: float) -> int:
    low = shape.ge if shape.ge is not None else -(1 << 63)
    high = shape.le if shape.le is not None else (shape.lt or 1 << 63) - 1
    beyond = [low - 1, high + 1] if wild and low > -(1 << 63) else []
    return dice.choice([low, low + 1, dice.randint(low, min(high, low + 9)), high - 1, high, *beyond])


def _text(shape: inspect.StrType, dice: Random, wild: float) -> str:
    shortest, longest = shape.min_length or 0, shape.max_length or LONG
    candidates = [
        text
        for text in (*TEXTS, TRACE, "0" * 64)
        if wild or (shortest <= len(text) <= longest and re.search(shape.pattern or "", text))
    ]
    return dice.choice(candidates or ["x" * shortest])


def _length(shape: inspect.BytesType | inspect.VarTupleType, dice: Random, wild: float) -> int:
    shortest, longest = shape.min_length or 0, min(shape.max_length or 64, LONG if wild else 64)
    lengths = [shortest, min(longest, shortest + 4), min(longest, shortest + 8), longest]
    return dice.choice(lengths) + (1 if wild and dice.random() < wild else 0)


def odd_ticket(dice: Random, address: str) -> str:
    """The text of a ticket that leads to `address`, where it can be read at all."""
    rank = build(ticket.TicketRank, daemon="evil", address=address, pool="p", offer="o", blocks=0, incarnation=0)
    text = _ticket([rank] * dice.choice((1, 1, 2, 8)), dice)
    return text if dice.random() < 0.8 else text[: dice.randrange(len(text))] + dice.choice(("", "=", "é", "A" * 9))


def ticket_of(addresses: list[str]) -> str:
    """A ticket with a rank at each address."""
    ranks = [
        build(ticket.TicketRank, daemon="evil", address=address, pool="p", offer="o", blocks=0, incarnation=0)
        for address in addresses
    ]
    return _ticket(ranks, None)


def _ticket(ranks: list[Any], dice: Random | None) -> str:
    spans = (SPAN,)
    tokens = 16 if dice is None else dice.choice((16, 16, 0, 1, (1 << 63) - 1))
    return str(build(ticket.Ticket, tokens=tokens, ranks=tuple(ranks), blocks=(spans,)).encode())


SPAN = [0, 0, bytes(4)]
"""One block, number 0, of one group."""
