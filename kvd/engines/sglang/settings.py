"""The settings in the environment variable `KVD_SGLANG`, as JSON; SGLang has no flag for those of a backend."""

from collections.abc import Mapping
from typing import Final

import msgspec

from kvd.engines.settings import EngineSettings, checked

VARIABLE: Final = "KVD_SGLANG"


class Settings(EngineSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The backend's settings. `{rank}` is replaced in `socket` and `worker`."""

    worker: str = "sglang-{rank}"


def read_settings(environment: Mapping[str, str], rank: int, ranks: int) -> Settings:
    """The settings in `environment` of a rank of an engine of so many `ranks`.

    Raises:
        BadRequest: `BAD_CONFIG`, a setting is unknown or out of bounds, it is not JSON, or ranks share a pool.

    """
    text = environment.get(VARIABLE) or "{}"
    places = "KVD_SOCKET, or into worker"
    return checked(VARIABLE, lambda: msgspec.json.decode(text, type=Settings), ranks, places).filled(rank=rank)
