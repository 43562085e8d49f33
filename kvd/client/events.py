"""What workers name, blocks, and the events that `poll` and `wait` return.

Every pull ends in exactly one of `Done`, `Failed` and `Cancelled`; if that is `quarantined`, exactly one `Freed`
follows. Every accepted offer ends in exactly one `Released`.
"""

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvd.errors import ErrorCode, refusal
from kvd.protocol.types import Span


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of one KV-cache group: `ids[i]` holds the sequence's block number `first + i`.

    `ids` are block ids in the worker's own pool: integers, or packed as little-endian unsigned 32-bit integers.
    """

    group: int
    first: int
    ids: Sequence[int] | bytes


def spans(blocks: Iterable[Blocks]) -> tuple[Span, ...]:
    """Encodes `blocks` for a message.

    Raises:
        BadRequest: `BAD_BLOCKS`, an item is not `Blocks`, an id is not an unsigned 32-bit integer, or the bytes are not
            whole ids.

    """
    return tuple(Span(part.group, part.first, _packed(part)) for part in listed(blocks))


def listed(blocks: Iterable[Blocks]) -> tuple[Blocks, ...]:
    """What a caller gave as blocks.

    Raises:
        BadRequest: `BAD_BLOCKS`, it is something else.

    """
    parts = tuple(blocks) if isinstance(blocks, Iterable) else (blocks,)
    for part in parts:
        if not isinstance(part, Blocks):
            raise refusal(ErrorCode.BAD_BLOCKS, f"{part!r} is given as blocks; name them as Blocks(group, first, ids)")
    return parts


def _packed(blocks: Blocks) -> bytes:
    if isinstance(blocks.ids, bytes | bytearray | memoryview):  # whose items would be taken for ids
        packed = bytes(blocks.ids)
        if len(packed) % 4:
            raise refusal(
                ErrorCode.BAD_BLOCKS, f"group {blocks.group}: {len(packed)} bytes of block ids are not whole u32s"
            )
        return packed
    try:
        return struct.pack(f"<{len(blocks.ids)}I", *blocks.ids)
    except (struct.error, TypeError) as error:
        raise refusal(ErrorCode.BAD_BLOCKS, f"group {blocks.group}: block ids must be u32s ({error})") from error


@dataclass(frozen=True, slots=True)
class Offered:
    """The daemon accepted an `offer_nowait`: `ticket` is for its consumer. Do not write to the blocks."""

    offer: str
    ticket: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class OfferRefused:
    """The daemon refused an `offer_nowait`: nobody reads its blocks."""

    offer: str
    code: str
    text: str


@dataclass(frozen=True, slots=True)
class NotExtended:
    """The daemon refused an `extend_offer` or a `close_offer`: the offer stands as it was before.

    Its readers wait for what comes next. Extend or close it rightly, or cancel it.
    """

    offer: str
    code: str
    text: str


@dataclass(frozen=True, slots=True)
class Released:
    """The offer has ended, and no later read of its blocks will count as done: they are the worker's again.

    `reason` is `read`, `expired`, `withdrawn`, `shutdown`, or `daemon lost`.
    """

    offer: str
    reason: str


@dataclass(frozen=True, slots=True)
class Done:
    """Every block of the pull has the bytes that were offered."""

    request: str


@dataclass(frozen=True, slots=True)
class Failed:
    """The pull failed. `blocks` hold nothing useful; if `quarantined`, do not reuse them before `Freed`."""

    request: str
    code: str
    text: str
    quarantined: bool
    blocks: tuple[Blocks, ...]


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The pull was cancelled in time; `quarantined` and `blocks` as for `Failed`."""

    request: str
    quarantined: bool
    blocks: tuple[Blocks, ...]


@dataclass(frozen=True, slots=True)
class Freed:
    """Nothing can write to `blocks` of this failed or cancelled pull any more."""

    request: str
    blocks: tuple[Blocks, ...]


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The daemon cannot be reached, or refuses this worker. For logs: requests end separately.

    The client goes on trying to attach, unless the refusal is for good: then each request raises it.
    """

    code: str
    text: str


@dataclass(frozen=True, slots=True)
class Reattached:
    """The daemon is back: the `same` one, or one started since. The pool's bytes are unchanged."""

    incarnation: int
    same: bool


@dataclass(frozen=True, slots=True)
class DaemonError:
    """The daemon could not read a message. For logs: the client checks what it sends, so this is a bug."""

    code: str
    text: str


Event = (
    Offered
    | OfferRefused
    | NotExtended
    | Released
    | Done
    | Failed
    | Cancelled
    | Freed
    | Disconnected
    | Reattached
    | DaemonError
)


def name_of(event: Event) -> str:
    """The name of the offer or pull that `event` is about; empty for none."""
    match event:
        case Offered(name) | OfferRefused(name) | NotExtended(name) | Released(name):
            return name
        case Done(name) | Failed(name) | Cancelled(name) | Freed(name):
            return name
        case _:
            return ""
