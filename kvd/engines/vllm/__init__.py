"""vLLM on kvd: `KvdConnector`, which `plugin` makes known to vLLM.

vLLM makes one connector in the scheduler's process, which decides what is offered and pulled (`scheduler`), and one in
each worker's, which owns the session with the rank's daemon (`worker`). `cache` says what its memory holds. `growing`
and `turns` are what both do for offers that grow, and for conversations. Only `cache`, `connector` and `stats`
import vLLM or torch.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    """Imports vLLM only when the connector itself is asked for."""
    if name == "KvdConnector":
        from kvd.engines.vllm.connector import KvdConnector  # noqa: PLC0415 - vLLM is there only inside of vLLM

        return KvdConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
