"""What the commands of this folder share: a folder with the model, and servers that are kept to cores, or suspended."""

import asyncio
import contextlib
import importlib.util
import os
import shutil
import signal
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Final, TypeVar

from kvd.errors import BadRequest, ErrorCode, Unavailable
from kvd.processes import ProcessEndedError
from tests.vllm.testbed.catalog import write_models
from tests.vllm.testbed.http import HttpError
from tests.vllm.testbed.pair import KvdPair, Pair

MODEL: Final = "bench"
TOKEN_BYTES: Final = 131_072
"""Of its KV cache: 16 layers, 8 KV heads of 128."""

PLACEMENTS: Final = ("pinned", "unpinned")
"""Each server of a pair on a core of its own, or all on all."""


SERVED_SECONDS: Final = 60.0
RETRY_SECONDS: Final = 0.05

Answer = TypeVar("Answer")


@contextlib.contextmanager
def model_folder(command: str) -> Iterator[Path]:
    """A folder with the model, for what servers write, too. It stays if a server fails: their logs are there.

    Raises:
        BadRequest: `BAD_CONFIG`, vLLM is not installed.
        Unavailable: `CANCELLED`, a server failed inside the context, or its time was over.

    """
    if importlib.util.find_spec("vllm") is None:
        raise BadRequest(ErrorCode.BAD_CONFIG, "vLLM is not installed: make setup-vllm, then .venv-vllm/bin/python")
    folder = Path(tempfile.mkdtemp(prefix=f"kvd-{command}-"))
    try:
        write_models(folder, MODEL)
        yield folder
    except (HttpError, ProcessEndedError, TimeoutError) as error:
        why = f"{type(error).__name__} {error}".rstrip()
        text = f"ended before the last round: {why}; the servers' logs are in {folder}"
        raise Unavailable(ErrorCode.CANCELLED, text) from error
    shutil.rmtree(folder)


def as_users_run(pair: KvdPair) -> None:
    """Takes the test bed's settings away, with which daemons lose no peer, however late it answers."""
    for daemon in pair.daemons.values():
        daemon.settings = {}


async def until_served(ask: Callable[[], Awaitable[Answer]]) -> Answer:
    """The first answer of a pair that has just started, or whose daemon has: requests may fail before.

    NixlConnector's handshake fails after 5 s, in which a server that has just started may not answer.

    Raises:
        TimeoutError: None came in a minute.

    """
    async with asyncio.timeout(SERVED_SECONDS):
        while True:
            try:
                return await ask()
            except HttpError:
                await asyncio.sleep(RETRY_SECONDS)


def bear_suspension(pair: Pair) -> None:
    """Has its engines take no step for hung, as vLLM does after 300 s: others may have their turns for longer."""
    for server in (pair.prefill, pair.decode):
        server.variables |= {"VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "3600"}


def suspend(pair: Pair) -> None:
    """Stops both servers, so that another pair has the cores."""
    for server in (pair.prefill, pair.decode):
        server.signal_group(signal.SIGSTOP)


def resume(pair: Pair, placement: str) -> None:
    """Has those servers that run go on, placed so."""
    cores = sorted(os.sched_getaffinity(0))
    for server, core in zip((pair.prefill, pair.decode), (cores[0], cores[-1]), strict=True):
        if server.running:
            server.keep_to({core} if placement == "pinned" else set(cores))
            server.signal_group(signal.SIGCONT)
