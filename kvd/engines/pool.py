"""A pool as an engine gets it: attached, and as the tensor in which the engine's cache lies; its daemon, in the log."""

import logging
from collections.abc import Callable
from typing import TypeVar

import torch

from kvd.client import DaemonError, Disconnected, Reattached
from kvd.client.session import Session
from kvd.errors import ErrorCode, Unavailable, refusal
from kvd.layout import CacheSpec

logger = logging.getLogger(__name__)

_QUIET_SECONDS = 5.0
"""An engine that attaches later says why: no daemon is there yet, or another engine has the pool of that name."""

_Client = TypeVar("_Client")


def attach(by: Callable[..., _Client], socket: str, name: str, spec: CacheSpec, timeout: float) -> _Client:
    """Attaches in `timeout` seconds; what it waits for is logged after a moment, as an engine may wait for minutes.

    `by` is `Worker.attach`, or is called like it.

    Raises:
        KvdError: as `Worker.attach`.

    """
    try:
        return by(socket, name=name, spec=spec, timeout=min(_QUIET_SECONDS, timeout))
    except Unavailable as error:
        left = timeout - _QUIET_SECONDS
        if left <= 0:
            raise
        logger.warning("no KV cache from kvd yet (%s); trying for %g s more", error.text, left)
    return by(socket, name=name, spec=spec, timeout=left)


def pool_tensor(client: Session) -> torch.Tensor:
    """The pool of an attached worker as int8 [nbytes], sharing its memory; what an earlier session left is zeroed.

    On a GPU it is that of the daemon, found by its UUID, whatever ordinal it has here.

    Raises:
        InternalError: torch made a copy.

    """
    if client.device:
        pool = client.device_pool
        tensor = torch.as_tensor(pool, device=torch.device("cuda", pool.ordinal)).view(torch.int8)
        if tensor.data_ptr() != pool.pointer:
            text = f"torch copied the pool at {pool.pointer:#x} of {client.device} to {tensor.data_ptr():#x}"
            raise refusal(ErrorCode.INTERNAL, text)
    else:
        tensor = torch.frombuffer(client.pool, dtype=torch.int8)
    return tensor.zero_() if client.kept else tensor


def log_session(event: Disconnected | Reattached | DaemonError, name: str) -> None:
    """Logs what has become of the session in which the pool is attached under `name`."""
    match event:
        case Disconnected(code, text):
            logger.warning("the daemon of %s is away (%s): %s", name, code, text)
        case Reattached(_, same):
            logger.warning("the daemon of %s is back%s", name, "" if same else ", started anew")
        case DaemonError(code, text):
            logger.error("the daemon of %s: %s: %s", name, code, text)
