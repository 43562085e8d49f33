"""What a worker is told by `poll` and `wait`.

Every pull ends in exactly one of `Done`, `Failed` and `Cancelled`. One that ended `quarantined` is followed by exactly
one `Freed`. Every offer that stood ends in exactly one `Released`.
"""

from dataclasses import dataclass, field

from kvd.client.blocks import Blocks


@dataclass(frozen=True, slots=True)
class Offered:
    """The offer made by `offer_nowait` stands: `ticket` is for its consumer. The blocks must not be written to."""

    offer: str
    ticket: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class OfferRefused:
    """The offer made by `offer_nowait` does not stand: nobody reads its blocks."""

    offer: str
    code: str
    text: str


@dataclass(frozen=True, slots=True)
class Released:
    """The offer has ended; nobody will read its blocks and be told `Done`: they are the worker's again.

    `reason` is `read`, `expired`, `withdrawn`, `shutdown`, or `daemon lost`.
    """

    offer: str
    reason: str


@dataclass(frozen=True, slots=True)
class Done:
    """Every block of the pull is in place, as it was offered."""

    request: str


@dataclass(frozen=True, slots=True)
class Failed:
    """The pull failed. `blocks` hold nothing of use, and if `quarantined` must not be reused before `Freed`."""

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
    """The daemon cannot be reached just now; the client attaches again by itself. For logs: requests end separately."""

    code: str
    text: str


@dataclass(frozen=True, slots=True)
class Reattached:
    """The daemon is there again: the `same` one, or one that was started since, with the pool's bytes as they are."""

    incarnation: int
    same: bool


@dataclass(frozen=True, slots=True)
class DaemonError:
    """The daemon could not make sense of a message. For logs: this client checks what it sends, so it is a bug."""

    code: str
    text: str


Event = Offered | OfferRefused | Released | Done | Failed | Cancelled | Freed | Disconnected | Reattached | DaemonError
