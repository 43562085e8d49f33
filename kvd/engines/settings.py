"""The settings that adapters of all engines have."""

import os
from collections.abc import Callable
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from kvd.errors import ErrorCode, refusal
from kvd.limits import MAX_LEASE_TTL, MAX_PULL_TIMEOUT, MIN_PULL_TIMEOUT
from kvd.protocol.address import DEFAULT_SOCKET

Ttl = Annotated[float, Meta(gt=0, le=MAX_LEASE_TTL)]
_Timeout = Annotated[float, Meta(ge=MIN_PULL_TIMEOUT, le=MAX_PULL_TIMEOUT)]


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An adapter's settings; times in seconds."""

    socket: str = msgspec.field(default_factory=lambda: os.environ.get("KVD_SOCKET") or DEFAULT_SOCKET)
    """Session socket of the rank's daemon: like the daemon's own setting, from `KVD_SOCKET` unless it is given."""
    worker: str
    """Name of the pool at the daemon. It stays the same over restarts of the engine, which so finds its pool again."""
    model: str = ""
    """The model as peers are told of it, whose own must be the same; if empty, its name or path, as given."""
    offer_ttl: Ttl = 30.0
    """How long the producer holds blocks that no decode engine asks for: from there on, it does so while one does."""
    pull_timeout: _Timeout = 60.0
    """How long a pull may take once the decode engine has blocks for it; of an offer that grows, longer."""
    attach_timeout: _Timeout = 60.0
    """How long a starting engine waits for its daemon."""


_Settings = TypeVar("_Settings", bound=EngineSettings)


def checked(where: str, read: Callable[[], _Settings]) -> _Settings:
    """What `read` makes of the settings given at `where`.

    Raises:
        BadRequest: `BAD_CONFIG`, a setting is unknown or out of bounds, or they cannot be read.

    """
    try:
        return read()
    except msgspec.DecodeError as error:  # of which `ValidationError` is one
        raise refusal(ErrorCode.BAD_CONFIG, f"{where}: {error}") from error
