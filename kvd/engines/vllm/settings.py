"""The settings in `kv_connector_extra_config`."""

import os
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvd.engines.vllm.turns import TurnPolicy
from kvd.errors import ErrorCode, refusal
from kvd.limits import MAX_LEASE_TTL, MAX_PULL_TIMEOUT, MIN_PULL_TIMEOUT
from kvd.protocol.address import DEFAULT_SOCKET

_Ttl = Annotated[float, Meta(gt=0, le=MAX_LEASE_TTL)]
_Share = Annotated[float, Meta(ge=0, lt=1)]
_Timeout = Annotated[float, Meta(ge=MIN_PULL_TIMEOUT, le=MAX_PULL_TIMEOUT)]

_TURNS = TurnPolicy()


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The connector's settings; times in seconds. `{rank}` and `{dp_rank}` are replaced in `socket` and `worker`."""

    socket: str = msgspec.field(default_factory=lambda: os.environ.get("KVD_SOCKET") or DEFAULT_SOCKET)
    """Session socket of the rank's daemon: like the daemon's own setting, from `KVD_SOCKET` unless it is given."""
    worker: str = "vllm-{dp_rank}-{rank}"
    """Name of the pool at the daemon. It stays the same over restarts of the engine, which so finds its pool again."""
    model: str = ""
    """The model as peers are told of it, whose own must be the same; if empty, its name or path as vLLM was given.

    If it is given, LoRA adapters are known to peers by their names alone, without their paths.
    """
    drafter: str = ""
    """The drafter as peers are told of it, whose own must be the same; if empty, its name or path, or `model` if it is
    part of the model."""
    offer_ttl: _Ttl = 30.0
    """How long the producer holds blocks that no decode engine asks for: from there on, it does so while one does."""
    turn_ttl: _Ttl = _TURNS.ttl
    """How long a decode engine keeps an answer for the next turn of its conversation, whose prefill engine pulls it."""
    turn_share: _Share = _TURNS.share
    """The most of its KV cache that it keeps so. It gives up the oldest ones when it is short of blocks itself."""
    every_turn: bool = _TURNS.every
    """Whether it keeps every answer and says so in it, for routers that do not ask for that (`kvd_turn`)."""
    pull_timeout: _Timeout = 60.0
    """How long a pull may take once the decode engine has blocks for it."""
    attach_timeout: _Timeout = 60.0
    """How long a starting engine waits for its daemon."""

    def for_rank(self, rank: int, dp_rank: int) -> "Settings":
        """These settings with the numbers filled in."""
        return msgspec.structs.replace(
            self,
            socket=self.socket.replace("{rank}", str(rank)).replace("{dp_rank}", str(dp_rank)),
            worker=self.worker.replace("{rank}", str(rank)).replace("{dp_rank}", str(dp_rank)),
        )


def read_settings(extra: Mapping[str, Any], ranks: int) -> Settings:
    """The settings of an engine of `ranks` ranks.

    Raises:
        BadRequest: `BAD_CONFIG`, a setting is unknown or out of bounds.

    """
    try:
        settings = msgspec.convert(dict(extra), Settings)
    except msgspec.ValidationError as error:
        raise refusal(ErrorCode.BAD_CONFIG, f"kv_connector_extra_config: {error}") from error
    if ranks > 1 and "{rank}" not in settings.socket and "{rank}" not in settings.worker:
        text = f"{ranks} ranks need a pool each: write {{rank}} into socket or worker of kv_connector_extra_config"
        raise refusal(ErrorCode.BAD_CONFIG, text)
    return settings
