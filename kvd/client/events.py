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
        BadRequest: `BAD_BLOCKS`, an id is not an unsigned 32-bit integer, or the bytes are not whole ids.

    """
    return tuple(Span(part.group, part.first, _packed(part)) for part in blocks)


def _packed(blocks: Blocks) -> bytes:
    if isinstance(blocks.ids, bytes):
        if len(blocks.ids) % 4:
            raise refusal(
                ErrorCode.BAD_BLOCKS, f"group {blocks.group}: {len(blocks.ids)} bytes of block ids are not whole u32s"
            )
        return blocks.ids
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
    """The daemon cannot be reached; the client attaches again by itself. For logs: requests end separately."""

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
