"""The settings in the environment variable `KVD_SGLANG`, as JSON; SGLang has no flag for those of a backend."""

import os
from collections.abc import Mapping
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from kvd.errors import ErrorCode, refusal
from kvd.limits import MAX_LEASE_TTL, MAX_PULL_TIMEOUT, MIN_PULL_TIMEOUT
from kvd.protocol.address import DEFAULT_SOCKET

VARIABLE: Final = "KVD_SGLANG"

_Ttl = Annotated[float, Meta(gt=0, le=MAX_LEASE_TTL)]
_Timeout = Annotated[float, Meta(ge=MIN_PULL_TIMEOUT, le=MAX_PULL_TIMEOUT)]


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The backend's settings; times in seconds."""

    socket: str = msgspec.field(default_factory=lambda: os.environ.get("KVD_SOCKET") or DEFAULT_SOCKET)
    """Session socket of the daemon: like the daemon's own setting, from `KVD_SOCKET` unless it is given."""
    worker: str = "sglang-0"
    """Name of the pool at the daemon. It stays the same over restarts of the engine, which so finds its pool again."""
    model: str = ""
    """The model as peers are told of it, whose own must be the same; if empty, its path as SGLang was given."""
    offer_ttl: _Ttl = 30.0
    """How long the producer holds pages that no decode engine asks for: from there on, it does so while one does."""
    pull_timeout: _Timeout = 60.0
    """How long a pull may take."""
    attach_timeout: _Timeout = 60.0
    """How long a starting engine waits for its daemon."""


def read_settings(environment: Mapping[str, str]) -> Settings:
    """The settings in `environment`.

    Raises:
        BadRequest: `BAD_CONFIG`, a setting is unknown or out of bounds, or the variable is not JSON.

    """
    try:
        return msgspec.json.decode(environment.get(VARIABLE) or "{}", type=Settings)
    except msgspec.DecodeError as error:
        raise refusal(ErrorCode.BAD_CONFIG, f"{VARIABLE}: {error}") from error
