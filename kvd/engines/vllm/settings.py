"""The settings in `kv_connector_extra_config`."""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvd.engines.settings import EngineSettings, Ttl, checked
from kvd.engines.vllm.turns.scheduler import TurnPolicy

_Share = Annotated[float, Meta(ge=0, lt=1)]

_TURNS = TurnPolicy()


class Settings(EngineSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The connector's settings. `{rank}` and `{dp_rank}` are replaced in `socket` and `worker`.

    If `model` is given, LoRA adapters are known to peers by their names alone, without their paths.
    """

    worker: str = "vllm-{dp_rank}-{rank}"
    drafter: str = ""
    """The drafter as peers are told of it, whose own must be the same; if empty, its name or path, or `model` if it is
    part of the model."""
    turn_ttl: Ttl = _TURNS.ttl
    """How long a decode engine keeps an answer for the next turn of its conversation, whose prefill engine pulls it."""
    turn_share: _Share = _TURNS.share
    """The most of its KV cache that it keeps so. When it is short of blocks itself, it gives turns up."""
    every_turn: bool = _TURNS.every
    """Whether it keeps every answer and says so in it, for routers that do not ask for that (`kvd_turn`)."""


def read_settings(extra: Mapping[str, Any], ranks: int) -> Settings:
    """The settings of an engine of `ranks` ranks.

    Raises:
        BadRequest: `BAD_CONFIG`, a setting is unknown or out of bounds, or ranks share a pool.

    """
    where, places = "kv_connector_extra_config", "socket or worker"
    return checked(where, lambda: msgspec.convert(dict(extra), Settings), ranks, places)
