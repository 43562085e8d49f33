"""NIXL over UCX: its settings, made before it is loaded, and the agent of a process.

UCX's TCP transport listens on every interface that it may use and authenticates nobody: whoever connects reads and
writes any address of the process, and random bytes have killed it. So it is kept to the interface and the ports that
the operator names, and a daemon whose peers are all on its host runs no NIXL.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Collection, Mapping, MutableMapping
from typing import Any, Final

from kvd import limits
from kvd.errors import ErrorCode, refusal
from kvd.transport.nixl.peers import text_of

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


def open_agent(name: str, devices: Collection[str] | None = None, ports: str | None = None) -> Any:
    """A NIXL agent with the UCX backend and no progress thread: the caller makes the progress.

    `devices` and `ports` are as in `choose_settings`; those of the first agent in a process hold for all.

    Raises:
        ImportError: nixl is not installed (it comes with the extra `daemon`).
        BadRequest: `BAD_CONFIG`, UCX does not start; the text names what it was told by the environment.

    """
    choose_settings(os.environ, devices, ports)
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
