"""The settings in the environment variable `KVD_SGLANG`, as JSON; SGLang has no flag for those of a backend."""

from collections.abc import Mapping
from typing import Final

import msgspec

from kvd.engines.settings import EngineSettings, checked

VARIABLE: Final = "KVD_SGLANG"


class Settings(EngineSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The backend's settings."""

    worker: str = "sglang-0"


def read_settings(environment: Mapping[str, str]) -> Settings:
    """The settings in `environment`.

    Raises:
        BadRequest: `BAD_CONFIG`, a setting is unknown or out of bounds, or the variable is not JSON.

    """
    return checked(VARIABLE, lambda: msgspec.json.decode(environment.get(VARIABLE) or "{}", type=Settings))
