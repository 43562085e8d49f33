"""The events that `poll` and `wait` return.

Every pull ends in exactly one of `Done`, `Failed` and `Cancelled`; if that is `quarantined`, exactly one `Freed`
follows. Every accepted offer ends in exactly one `Released`.
"""

from dataclasses import dataclass, field

from kvd.client.blocks import Blocks


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
