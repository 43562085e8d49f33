"""The settings in `kv_connector_extra_config`."""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvd.engines.settings import EngineSettings, Ttl, checked
from kvd.engines.vllm.turns.scheduler import TurnPolicy
from kvd.errors import ErrorCode, refusal

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
    settings = checked("kv_connector_extra_config", lambda: msgspec.convert(dict(extra), Settings))
    if ranks > 1 and "{rank}" not in settings.socket and "{rank}" not in settings.worker:
        text = f"{ranks} ranks need a pool each: write {{rank}} into socket or worker of kv_connector_extra_config"
        raise refusal(ErrorCode.BAD_CONFIG, text)
    return settings
