"""A NIXL agent scripted by a test: which slices are done, when, and what fails."""

from collections import deque
from collections.abc import Callable
from typing import Any


class nixlRemoteDisconnectError(Exception):  # noqa: N801 - the name is NIXL's
    pass


class nixlNotFoundError(Exception):  # noqa: N801
    pass


class nixlBackendError(Exception):  # noqa: N801
    pass


FAILURES = (nixlRemoteDisconnectError, nixlNotFoundError, nixlBackendError)


class Handle:
    def __init__(self, nixl: "ScriptedNixl") -> None:
        self.state: str | Exception = "PROC"
        self.held = False
        self.released = False
        nixl.live.add(self)
        self._nixl = nixl

    def release(self) -> None:
        if self.held:
            raise nixlBackendError("active")
        assert not self.released
        self.released = True
        self._nixl.live.discard(self)


class ScriptedNixl:
    """`transfers` are the handles posted so far; each poll of the network runs the next step of `script`."""

    def __init__(self) -> None:
        self.live: set[Handle] = set()
        self.transfers: list[Handle] = []
        self.agents: dict[str, bytes] = {}
        self.script: deque[Any] = deque()
        self.calls: list[str] = []
        self.sent: list[tuple[str, bytes]] = []
        self.messages: list[dict[str, list[bytes]]] = []
        self.refuse: Exception | None = None
        self.immediately: str | Exception = "PROC"
        self.on_transfer: Callable[[], object] = lambda: None

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        if self.script:
            self.script.popleft()()
        return self.messages.pop(0) if self.messages else {}

    def send_notif(self, agent: str, content: bytes) -> None:
        self.sent.append((agent, content))

    def add_remote_agent(self, metadata: bytes) -> None:
        self.calls.append("add")
        if self.refuse is not None:
            refused, self.refuse = self.refuse, None
            raise refused
        self.agents["p"] = metadata

    def make_connection(self, agent: str) -> None:
        self.calls.append("connect")

    def remove_remote_agent(self, agent: str) -> None:
        self.calls.append("remove")
        if self.agents.pop(agent, None) is None:
            raise nixlNotFoundError(agent)

    def register_memory(self, region: Any, mem_type: str) -> str:
        return "registration"

    def deregister_memory(self, registration: str) -> None:
        self.calls.append("deregister")

    def get_agent_metadata(self) -> bytes:
        return b"metadata"

    def get_reg_descs(self, regions: Any, mem_type: str) -> list[list[int]]:
        assert len(regions), "NIXL's raises IndexError"
        found: list[list[int]] = regions.tolist()
        return found

    def get_partial_agent_metadata(self, regions: list[list[int]], inc_conn_info: bool, backends: list[str]) -> bytes:
        return f"metadata of {regions}".encode()

    def prep_xfer_dlist(self, agent: str, rows: Any, mem_type: str) -> Handle:
        return Handle(self)

    def make_prepped_xfer(self, *arguments: Any) -> Handle:
        return Handle(self)

    def transfer(self, handle: Handle) -> str:
        self.on_transfer()
        self.transfers.append(handle)
        handle.state = self.immediately
        return self.check_xfer_state(handle)

    def check_xfer_state(self, handle: Handle) -> str:
        assert not handle.released
        if isinstance(handle.state, Exception):
            raise handle.state
        return handle.state
