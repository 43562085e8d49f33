"""Raw NIXL, to measure what kvd adds: the same descriptors, over the same memory, between the same processes."""

import contextlib
import threading
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np

from kvd.plan import Descriptors
from kvd.transport.nixl.poll_interval import RECENT
from kvd.transport.nixl.ucx import open_agent


class RawAgent:
    """A NIXL agent over memory of this process, of NIXL's kind `memory`; `devices` as `choose_settings` takes them."""

    def __init__(
        self, name: str, base: int, size: int, devices: Collection[str] | None = None, *, memory: str = "DRAM"
    ) -> None:
        self.base = base
        self._memory = memory
        self._agent: Any = open_agent(name, devices)
        self._agent.register_memory(np.array([[base, size, 0]], dtype=np.uint64), mem_type=memory)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def metadata(self) -> bytes:
        """What the other side connects with."""
        metadata: bytes = self._agent.get_agent_metadata()
        return metadata

    def serve(self, pause: float = RECENT) -> None:
        """Polls the network on a thread, every `pause` seconds.

        Without that nobody can connect to this agent, nor read from it over TCP.
        """

        def poll() -> None:
            while not self._stop.wait(pause):
                self._agent.get_new_notifs()

        self._thread = threading.Thread(target=poll, daemon=True)
        self._thread.start()

    def stop_serving(self) -> None:
        """Ends the thread."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def connect(self, metadata: bytes) -> str:
        """Connects to another agent and returns its name."""
        name: str = self._agent.add_remote_agent(metadata)
        self._agent.make_connection(name)
        return name

    @contextlib.contextmanager
    def prepared(self, peer: str, remote_base: int, descriptors: Descriptors) -> Iterator[Any]:
        """A transfer of `descriptors` from prepared lists, as NIXL intends it."""
        agent = self._agent
        local = agent.prep_xfer_dlist(
            "NIXL_INIT_AGENT", _rows(self.base, descriptors.dst, descriptors), mem_type=self._memory
        )
        remote = agent.prep_xfer_dlist(peer, _rows(remote_base, descriptors.src, descriptors), mem_type=self._memory)
        every = np.arange(descriptors.count, dtype=np.int32)
        handle = agent.make_prepped_xfer("READ", local, every, remote, every)
        yield handle
        agent.release_xfer_handle(handle)
        agent.release_dlist_handle(local)
        agent.release_dlist_handle(remote)

    def read(self, peer: str, remote_base: int, descriptors: Descriptors) -> None:
        """Reads `descriptors` in one transfer and waits for it."""
        with self.prepared(peer, remote_base, descriptors) as handle:
            state = self._agent.transfer(handle)
            while state == "PROC":
                state = self._agent.check_xfer_state(handle)
            if state != "DONE":
                raise RuntimeError(f"NIXL ended a read in state {state}")


def _rows(base: int, offsets: Any, descriptors: Descriptors) -> Any:
    rows = np.zeros((descriptors.count, 3), dtype=np.uint64)
    rows[:, 0] = offsets + np.uint64(base)
    rows[:, 1] = descriptors.length
    return rows
