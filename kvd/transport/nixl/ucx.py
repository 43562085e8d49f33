"""NIXL over UCX: its settings, made before it is loaded, the agent of a process, and what UCX says of its connections.

UCX's TCP transport listens on every interface that it may use and authenticates nobody: whoever connects reads and
writes any address of the process, and random bytes have killed it. So it is kept to the interface and the ports that
the operator names, and a daemon whose peers are all on its host runs no NIXL.

NIXL does not say which of its transports UCX chose for a peer, so UCX is asked. It lists its endpoints by address in
its virtual file system (`ucs_vfs_*`, meant for debuggers), and `ucp_ep_query` names the transports of one. Both are
called on the thread of the agent in question, the only one that makes or closes its endpoints, so a listed endpoint is
alive; a process has one agent. If a UCX lacks either function, the transports stay unknown.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
from collections.abc import Collection, Mapping, MutableMapping
from typing import Any, Final

from kvd import limits
from kvd.errors import ErrorCode, refusal
from kvd.units import printable, shortened

BACKENDS: Final = ("nixl_cu12", "nixl_cu13")

TCP_SETTINGS: Final = {
    "UCX_TCP_TX_SEG_SIZE": "512k",  # the message size of reads over TCP; UCX's default of 8 KiB costs a call each
    "UCX_TCP_RX_SEG_SIZE": "512k",  # a message must fit in here
}

ENVIRONMENT: Final = {
    "UCX_RCACHE_MAX_UNRELEASED": "1024",  # without it UCX's registration cache grows without bound
    "NIXL_LOG_LEVEL": "FATAL",  # failures are also raised and become events; the log would repeat them on stderr
    "UCX_LOG_LEVEL": "fatal",  # the same: it logs pages about a killed peer
    "UCX_MODULES": "^cuda",  # pools are host memory; it would map the CUDA driver, hundreds of megabytes
    "UCX_TCP_USER_TIMEOUT": f"{limits.TRANSPORT_SILENCE_SECONDS}s",  # a dead network ends reads, which nothing else can
    "UCX_DEBUG_SIGNO": "0",  # SIGHUP would turn its debug log on; here it reloads the allow-list
}
"""Read once, when NIXL and UCX are loaded."""

_PASSED_ON: Final = ("UCX_", "NIXL_", "IBV_", "RDMAV_", "MLX4_", "MLX5_", "LD_", "PYTHON", "LC_", "OPENBLAS_", "OMP_")
_PASSED_ON_TOO: Final = frozenset({"PATH", "HOME", "LANG", "TMPDIR", "TZ"})
"""Variables that NIXL, UCX, the loader and Python read, by their beginning or whole."""


def choose_settings(
    environment: MutableMapping[str, str], devices: Collection[str] | None, ports: str | None = None
) -> None:
    """Adds our settings. What the operator set stays; if that includes one of TCP's sizes, both are left alone.

    `devices` are the network devices by which other hosts reach this one, in UCX's spelling, and `ports` a range of TCP
    ports, such as `9930-9961`; None if any may be used.
    """
    chosen = dict(ENVIRONMENT)
    if not TCP_SETTINGS.keys() & environment:
        chosen |= TCP_SETTINGS
    if devices is not None:
        chosen["UCX_NET_DEVICES"] = ",".join(devices)
    if ports is not None:
        chosen["UCX_TCP_PORT_RANGE"] = ports
    for variable, value in chosen.items():
        environment.setdefault(variable, value)


def set_by_operator(environment: Mapping[str, str]) -> str:
    """The variables of UCX that are not as we choose them, for an error's text; they come from a pod's manifest."""
    ours = ENVIRONMENT | TCP_SETTINGS
    names = sorted(name for name in environment if name.startswith("UCX_") and environment[name] != ours.get(name))
    return " ".join(f"{name}={environment[name]}" for name in names)


def environment_of(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that a process with a UCX of its own gets: whoever reaches its port reads them all."""
    return {name: value for name, value in environment.items() if name.startswith(_PASSED_ON) or name in _PASSED_ON_TOO}


def nixl_name() -> str:
    """The name of NIXL's Python module, which is not loaded.

    There is one for each CUDA release. The package `nixl` would import torch, which the daemon never uses, only to
    choose between them. The one for CUDA 12 runs with the drivers of both.

    Raises:
        ImportError: NIXL is not installed.

    """
    for name in BACKENDS:
        if importlib.util.find_spec(name):
            return name
    raise ImportError(f"NIXL is not installed: none of {', '.join(BACKENDS)} is there; pip install --no-deps nixl-cu12")


def load_nixl() -> Any:
    """NIXL's Python module; `choose_settings` comes first.

    Raises:
        ImportError: NIXL is not installed.

    """
    return importlib.import_module(nixl_name())


def open_agent(name: str, devices: Collection[str] | None = None) -> Any:
    """A NIXL agent with the UCX backend and no progress thread: the caller makes the progress.

    `devices` is as in `choose_settings`; that of the first agent in a process holds for all.

    Raises:
        ImportError: nixl is not installed (it comes with the extra `daemon`).
        BadRequest: `BAD_CONFIG`, UCX does not start; the text names what it was told by the environment.

    """
    choose_settings(os.environ, devices, None)
    nixl = load_nixl()
    try:
        return make_agent(nixl, name)
    except failures_of(nixl) as error:
        told = set_by_operator(os.environ)
        text = f"UCX does not start ({text_of(error)}) with {told or 'no variable of its own set'}"
        fix = "change or remove what the manifest or the unit sets of that; UCX_LOG_LEVEL=info says more"
        raise refusal(ErrorCode.BAD_CONFIG, f"{text}; {fix}") from error


def failures_of(nixl: Any) -> tuple[type[Exception], ...]:
    """The errors of NIXL's module `nixl`, which have no base of their own."""
    bindings = vars(nixl._bindings)
    return tuple(kind for name, kind in bindings.items() if name.startswith("nixl") and name.endswith("Error"))


def make_agent(api: Any, name: str) -> Any:
    """A NIXL agent with the UCX backend and without a progress thread; `api` is NIXL's module of that name."""
    agent = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=[]))
    agent.create_backend("UCX", {})
    return agent


def text_of(error: Exception) -> str:
    """An error of NIXL in one line, which may quote what a peer sent."""
    return printable(shortened(f"{type(error).__name__}: {error}", limits.MAX_ERROR_TEXT))


# --- what UCX says of its connections ---------------------------------------------------------------------------------

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
