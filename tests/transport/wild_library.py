"""A stand-in for NIXL's module whose agent does what the metadata says."""

import os
import time
from typing import Any


def nixl_agent_config(**_settings: Any) -> None:
    return None


class nixl_agent:  # noqa: N801 - the name is NIXL's
    def __init__(self, name: str, config: None) -> None:
        self.loaded: list[bytes] = []

    def create_backend(self, backend: str, parameters: dict[str, str]) -> None:
        assert backend == "UCX"

    def add_remote_agent(self, metadata: bytes) -> bytes:
        if metadata == b"abort":
            os.abort()
        if metadata == b"hang":
            time.sleep(1000)
        if metadata == b"greedy":
            return bytes(1 << 32)
        if metadata == b"refused" or (metadata == b"other memory" and self.loaded):
            raise ValueError("NIXL_ERR_MISMATCH")
        self.loaded.append(metadata)
        return b"peer"

    def make_connection(self, agent: str) -> None:
        assert agent == "peer"

    def remove_remote_agent(self, agent: str) -> None:
        assert agent == "peer"
        self.loaded.clear()
