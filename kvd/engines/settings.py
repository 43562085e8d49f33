"""The settings that adapters of all engines have."""

import os
from collections.abc import Callable
from typing import Annotated, Self, TypeVar

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

    def filled(self, **numbers: int) -> Self:
        """These settings with each number in place of its name in braces, in `socket` and `worker`."""
        socket, worker = self.socket, self.worker
        for name, number in numbers.items():
            socket, worker = (text.replace(f"{{{name}}}", str(number)) for text in (socket, worker))
        return msgspec.structs.replace(self, socket=socket, worker=worker)


_Settings = TypeVar("_Settings", bound=EngineSettings)


def checked(where: str, read: Callable[[], _Settings], ranks: int, places: str) -> _Settings:
    """What `read` makes of the settings given at `where` to an engine of so many `ranks`.

    `places` says for people where the number of a rank can be written.

    Raises:
        BadRequest: `BAD_CONFIG`, a setting is unknown or out of bounds, they cannot be read, or ranks share a pool.

    """
    try:
        settings = read()
    except msgspec.DecodeError as error:  # of which `ValidationError` is one
        raise refusal(ErrorCode.BAD_CONFIG, f"{where}: {error}") from error
    if ranks > 1 and "{rank}" not in settings.socket and "{rank}" not in settings.worker:
        text = f"{ranks} ranks need a pool each: write {{rank}} into {places} of {where}"
        raise refusal(ErrorCode.BAD_CONFIG, text)
    return settings
