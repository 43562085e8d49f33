"""Opens the NIXL agent of a process."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any

from kvd.errors import ErrorCode, refusal
from kvd.transport.nixl.peers import text_of
from kvd.transport.nixl.ucx import choose_settings, load_nixl, make_agent, set_by_operator


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
