"""The settings in the environment variable `KVD_SGLANG`, as JSON; SGLang has no flag for those of a backend."""

from collections.abc import Mapping
from typing import Final

import msgspec

from kvd.engines.settings import EngineSettings, checked
from kvd.errors import ErrorCode, refusal

VARIABLE: Final = "KVD_SGLANG"


class Settings(EngineSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The backend's settings. `{rank}` is replaced in `socket` and `worker`."""

    worker: str = "sglang-{rank}"


def read_settings(environment: Mapping[str, str], rank: int, ranks: int) -> Settings:
    """The settings in `environment` of a rank of an engine of so many `ranks`.

    Raises:
        BadRequest: `BAD_CONFIG`, a setting is unknown or out of bounds, or the variable is not JSON.

    """
    settings = checked(VARIABLE, lambda: msgspec.json.decode(environment.get(VARIABLE) or "{}", type=Settings))
    if ranks > 1 and "{rank}" not in settings.socket + settings.worker:
        text = f"{ranks} ranks need a pool each: write {{rank}} into KVD_SOCKET, or into worker of {VARIABLE}"
        raise refusal(ErrorCode.BAD_CONFIG, text)
    return msgspec.structs.replace(
        settings,
        socket=settings.socket.replace("{rank}", str(rank)),
        worker=settings.worker.replace("{rank}", str(rank)),
    )
