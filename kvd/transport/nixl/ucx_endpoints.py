"""Asks the UCX that NIXL has loaded which of its transports it chose for a peer. NIXL does not say.

UCX lists its endpoints by address in its virtual file system (`ucs_vfs_*`, meant for debuggers), and `ucp_ep_query`
names the transports of one. Both are called on the thread of the agent in question, the only one that makes or closes
its endpoints, so a listed endpoint is alive; a process has one agent. If a UCX lacks either function, the transports
stay unknown.
"""

import ctypes
import os
from typing import Final

_OK: Final = 0
_FIELD_TRANSPORTS: Final = 1 << 3
_MAX_TRANSPORTS: Final = 64
_NAME_CHARACTERS: Final = 31
"""A context is named after its agent, and UCX cuts the name off here (`UCP_ENTITY_NAME_MAX` less the final zero)."""
_Visit = ctypes.PYFUNCTYPE(None, ctypes.c_char_p, ctypes.c_void_p)
"""Called under a lock of UCX. Lists keep the GIL: a thread with the GIL may want that lock, to end another agent."""


class _Entry(ctypes.Structure):
    """`ucp_transport_entry_t`."""

    _fields_ = (("transport", ctypes.c_char_p), ("device", ctypes.c_char_p))


class _Transports(ctypes.Structure):
    """`ucp_transports_t`."""

    _fields_ = (("entries", ctypes.POINTER(_Entry)), ("count", ctypes.c_uint), ("entry_size", ctypes.c_size_t))


class _Attributes(ctypes.Structure):
    """`ucp_ep_attr_t`; a `sockaddr_storage` has 128 bytes."""

    _fields_ = (
        ("mask", ctypes.c_uint64),
        ("name", ctypes.c_char * 32),
        ("local", ctypes.c_char * 128),
        ("remote", ctypes.c_char * 128),
        ("transports", _Transports),
        ("user_data", ctypes.c_void_p),
    )


class UcxEndpoints:
    """The endpoints of an existing agent.

    The first 31 characters of the agent's name must be unique in this process, since UCX knows no more of it.
    """

    def __init__(self, agent: str) -> None:
        self._agent = agent
        self._ucs = _loaded("libucs", "ucs_vfs_path_list_dir")
        self._ucp = _loaded("libucp", "ucp_ep_query")

    def endpoints(self) -> frozenset[int]:
        """Addresses of the endpoints that are open now; empty if UCX does not say."""
        context = f"/ucp/context/{self._agent[:_NAME_CHARACTERS]}"
        found: set[int] = set()
        for folder in ("/", "/ucp", "/ucp/context", context):
            self._list(folder)  # UCX fills a folder in when the one above it is read
        for worker in self._list(f"{context}/worker"):
            self._list(f"{context}/worker/{worker}")
            found.update(int(name, 16) for name in self._list(f"{context}/worker/{worker}/ep"))
        return frozenset(found)

    def path_since(self, before: frozenset[int]) -> str:
        """The transports of the endpoints opened since `before` was listed, as a path (`kvd.transport.path`)."""
        opened = self.endpoints() - before
        return " ".join(sorted({transport for endpoint in opened for transport in self.of(endpoint)}))

    def of(self, endpoint: int) -> list[str]:
        """The transports of an open endpoint as `transport/device`: `["tcp/lo", "cma/memory"]`."""
        if self._ucp is None:
            return []
        entries = (_Entry * _MAX_TRANSPORTS)()
        attributes = _Attributes(mask=_FIELD_TRANSPORTS)
        attributes.transports = _Transports(entries, _MAX_TRANSPORTS, ctypes.sizeof(_Entry))
        if self._ucp.ucp_ep_query(ctypes.c_void_p(endpoint), ctypes.byref(attributes)) != _OK:
            return []
        used = entries[: attributes.transports.count]
        return [f"{entry.transport.decode()}/{entry.device.decode()}" for entry in used]

    def components(self) -> list[str]:
        """UCX's components that found a device here: `cma`, `tcp`, `ib`, ...; empty if UCX does not say."""
        self._list("/")
        self._list("/uct")
        names = self._list("/uct/component")
        for name in names:
            self._list(f"/uct/component/{name}")
        return sorted(name for name in names if self._list(f"/uct/component/{name}/memory_domain"))

    def _list(self, folder: str) -> list[str]:
        names: list[str] = []
        if self._ucs is not None:
            visit = _Visit(lambda name, _context: names.append(name.decode()))
            self._ucs.ucs_vfs_path_list_dir(folder.encode(), visit, None)
        return names


def _loaded(library: str, symbol: str) -> ctypes.PyDLL | None:
    """The library already mapped into this process, if it has `symbol`; NIXL's wheels bring their own UCX."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        paths = {line.split(maxsplit=5)[-1].strip() for line in maps if f"/{library}" in line}
    for path in sorted(paths):
        name = os.path.basename(path)
        if name.startswith((f"{library}.", f"{library}-")):
            loaded = ctypes.PyDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
            return loaded if hasattr(loaded, symbol) else None
    return None
