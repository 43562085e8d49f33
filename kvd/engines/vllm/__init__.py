"""vLLM on kvd: `KvdConnector`, which vLLM loads by `"kv_connector_module_path": "kvd.engines.vllm"`.

A connector is made twice: in the scheduler's process, where it decides what is offered and pulled (`scheduler`), and in
every worker's, where it owns the session with the rank's daemon (`worker`). Only `connector`, `facts`, `messages` and
`stats` import vllm.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    """The connector, without importing vLLM for those who want another module of this package."""
    if name == "KvdConnector":
        from kvd.engines.vllm.connector import KvdConnector  # noqa: PLC0415 - vLLM is there only inside of vLLM

        return KvdConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
