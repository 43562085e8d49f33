"""The errors of kvd, by whose fault they are.

- `BadRequest`: the sender broke a rule. Sending it again will fail again.
- `Unavailable`: nobody broke a rule; something is full, gone or late. Trying again later may work.
- `InternalError`: kvd itself is at fault. Please report it.

Whose fault it is follows from the `ErrorCode`: `refusal` makes the error for one. It travels as its code and text, from
which `error_from_code` makes the same error again. Codes are part of the protocol: only append.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import ClassVar

from kvd.limits import MAX_ERROR_TEXT
from kvd.units import printable, shortened


class ErrorCode(StrEnum):
    """What went wrong; stable across versions."""

    # BadRequest
    BAD_MESSAGE = "bad_message"
    BAD_VERSION = "bad_version"
    TOO_LARGE = "too_large"
    WRONG_STATE = "wrong_state"
    NOT_ATTACHED = "not_attached"
    NOT_PERMITTED = "not_permitted"
    BAD_SPEC = "bad_spec"
    BAD_POOL = "bad_pool"
    BAD_BLOCKS = "bad_blocks"
    DUPLICATE_REQUEST = "duplicate_request"
    UNKNOWN_REQUEST = "unknown_request"
    BAD_TICKET = "bad_ticket"
    INCOMPATIBLE = "incompatible"
    BAD_CONFIG = "bad_config"
    # Unavailable
    OVERLOADED = "overloaded"
    SHUTTING_DOWN = "shutting_down"
    DEADLINE = "deadline"
    OFFER_GONE = "offer_gone"
    LEASE_BROKEN = "lease_broken"
    PEER_LOST = "peer_lost"
    TRANSPORT = "transport"
    POOL_BUSY = "pool_busy"
    BLOCKS_BUSY = "blocks_busy"
    DAEMON_LOST = "daemon_lost"
    CANCELLED = "cancelled"
    NO_DEVICE = "no_device"
    # InternalError
    INTERNAL = "internal"


class KvdError(Exception):
    """Base of all errors of kvd: `code` for programs, the text for people.

    What it quotes may be anybody's, such as the name of a socket, or a layout of megabytes: logs and terminals get it
    on one line of `MAX_ERROR_TEXT` characters at most, without escapes, and it can be sent and kept.
    """

    codes: ClassVar[frozenset[ErrorCode]] = frozenset()

    def __init__(self, code: ErrorCode, text: str) -> None:
        text = printable(shortened(text, MAX_ERROR_TEXT))
        super().__init__(f"{code}: {text}")
        self.code = code
        self.text = text


class BadRequest(KvdError):
    """The sender's fault (not `Unavailable`: the same message will be refused again)."""


class Unavailable(KvdError):
    """Nobody's fault just now: full, late, gone or shutting down (not `BadRequest`: trying later may work)."""

    codes = frozenset(
        {
            ErrorCode.OVERLOADED,
            ErrorCode.SHUTTING_DOWN,
            ErrorCode.DEADLINE,
            ErrorCode.OFFER_GONE,
            ErrorCode.LEASE_BROKEN,
            ErrorCode.PEER_LOST,
            ErrorCode.TRANSPORT,
            ErrorCode.POOL_BUSY,
            ErrorCode.BLOCKS_BUSY,
            ErrorCode.DAEMON_LOST,
            ErrorCode.CANCELLED,
            ErrorCode.NO_DEVICE,
        }
    )


class DeviceError(Unavailable):
    """A GPU's driver refused a call; `result` is its name for the reason, such as `CUDA_ERROR_INVALID_VALUE`.

    If the context is `lost`, every later call of the process fails, too.
    """

    def __init__(self, code: ErrorCode, text: str, result: str, *, lost: bool = False) -> None:
        super().__init__(code, text)
        self.result = result
        self.lost = lost


class NoMemory(Unavailable):
    """There is too little memory for a pool; `lacks` bytes more would do."""

    def __init__(self, text: str, lacks: int) -> None:
        super().__init__(ErrorCode.OVERLOADED, text)
        self.lacks = lacks


class InternalError(KvdError):
    """kvd's own fault: an invariant did not hold."""

    codes = frozenset({ErrorCode.INTERNAL})


def refusal(code: ErrorCode, text: str) -> KvdError:
    """The error with this code, of the class that says whose fault it is."""
    for kind in (Unavailable, InternalError):
        if code in kind.codes:
            return kind(code, text)
    return BadRequest(code, text)


def error_from_code(code: str, text: str) -> KvdError:
    """The error for a received `code` and `text`; an unknown code, of a newer version, is a `BadRequest`."""
    if code not in ErrorCode.__members__.values():
        return BadRequest(ErrorCode.BAD_MESSAGE, f"{text} (code {code!r}, unknown to this version)")
    return refusal(ErrorCode(code), text)


def describe(error: BaseException) -> str:
    """An exception as logs may show it: with its text only if that is kvd's, which quotes no messages."""
    return f"{type(error).__name__}: {error.text}" if isinstance(error, KvdError) else type(error).__name__


@contextmanager
def on_error(undo: Callable[[], object]) -> Iterator[None]:
    """Calls `undo` if something is raised inside the `with`, and lets that pass."""
    try:
        yield
    except BaseException:
        undo()
        raise
