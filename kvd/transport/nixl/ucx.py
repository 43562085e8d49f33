"""UCX's settings, made before NIXL loads it: which devices it may be reached by, how it sends, what it logs.

UCX's TCP transport listens on every interface that it may use and authenticates nobody; random bytes have killed the
process. So a daemon whose peers are all on its host runs UCX without TCP.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Collection, MutableMapping
from typing import Any, Final

ONE_HOST_TRANSPORTS: Final = "self,sm,cuda"
"""Transports that open no socket: shared memory, CMA, and CUDA's own between GPUs of the host."""

BACKENDS: Final = ("nixl_cu12", "nixl_cu13")

_LOCAL: Final = frozenset(
    "self loopback sm shm mm posix sysv cma xpmem knem cuda cuda_copy cuda_ipc gdr_copy".split()  # noqa: SIM905
)
"""UCX's names for transports, and groups of them, that reach this host only."""

TCP_SETTINGS: Final = {
    "UCX_TCP_TX_SEG_SIZE": "512k",  # the message size of reads over TCP; UCX's default of 8 KiB costs a call each
    "UCX_TCP_RX_SEG_SIZE": "512k",  # a message must fit in here
}

ENVIRONMENT: Final = {
    "UCX_RCACHE_MAX_UNRELEASED": "1024",  # without it UCX's registration cache grows without bound
    "NIXL_LOG_LEVEL": "FATAL",  # failures are also raised and become events; the log would repeat them on stderr
    "UCX_LOG_LEVEL": "fatal",  # the same: it logs pages about a killed peer
    "UCX_MODULES": "^cuda",  # pools are host memory; it would map the CUDA driver, hundreds of megabytes
    "UCX_DEBUG_SIGNO": "0",  # SIGHUP would turn its debug log on; here it reloads the allow-list
}
"""Read once, when NIXL and UCX are loaded."""


def choose_settings(environment: MutableMapping[str, str], devices: Collection[str] | None) -> None:
    """Adds our settings. What the operator set stays; if that includes one of TCP's sizes, both are left alone.

    `devices` are the network devices by which other hosts reach this one, in UCX's spelling: empty if all peers are on
    this host, None if any device may be used.
    """
    chosen = dict(ENVIRONMENT)
    if not TCP_SETTINGS.keys() & environment:
        chosen |= TCP_SETTINGS
    if devices:
        chosen["UCX_NET_DEVICES"] = ",".join(devices)
    elif devices is not None:
        # If the operator wants TCP all the same, it listens on the loopback interface.
        chosen |= {"UCX_TLS": ONE_HOST_TRANSPORTS, "UCX_NET_DEVICES": "lo"}
    for variable, value in chosen.items():
        environment.setdefault(variable, value)


def load_nixl() -> Any:
    """NIXL's Python module, without torch.

    There is one for each CUDA release. The package `nixl` would import torch, which the daemon never uses, only to
    choose between them. The one for CUDA 12 runs with the drivers of both.

    Raises:
        ImportError: NIXL is not installed.

    """
    for name in BACKENDS:
        if importlib.util.find_spec(name):
            return importlib.import_module(name)
    raise ImportError(f"NIXL is not installed: none of {', '.join(BACKENDS)} is there; pip install --no-deps nixl-cu12")


def make_agent(api: Any, name: str) -> Any:
    """A NIXL agent with the UCX backend and without a progress thread; `api` is NIXL's module of that name."""
    agent = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=[]))
    agent.create_backend("UCX", backend_parameters())
    return agent


def backend_parameters() -> dict[str, str]:
    """Parameters of NIXL's UCX backend, given the process's environment.

    In mode "peer" UCX picks transports that notice a dead peer, of which TCP is the only one within a host. CMA needs
    none: the kernel refuses to read a process that is gone, and the daemons' heartbeats find it, too.
    """
    named = {name.strip() for name in os.environ.get("UCX_TLS", "").split(",")}
    return {"ucx_error_handling_mode": "none" if named <= _LOCAL else "peer"}
