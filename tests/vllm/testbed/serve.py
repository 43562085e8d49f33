"""vLLM's API server with no orphans: `python -m tests.vllm.testbed.serve FLAGS`.

It dies with whoever started it. vLLM runs its engine and each worker in a process of its own, which outlive a server
that is killed; here the kernel kills every process of a server with its parent. On a CPU each of them is a new
interpreter, which imports vLLM for eight seconds; here they are forked, as vLLM does it on a GPU. None of them spins:
the servers of a test, a daemon each and the test share as few as two cores.
"""

import ctypes
import multiprocessing
import os
import runpy
import signal
import time
from functools import partial
from multiprocessing import resource_tracker, shared_memory
from typing import Any

_PR_SET_PDEATHSIG = 1


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:
        os._exit(1)


def _fork_only() -> None:
    fork: Any = multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda method=None: fork
    resource_tracker.ensure_running()  # by the engine it would be killed, before it has removed the shared memory


_die_with_parent()
os.register_at_fork(after_in_child=_die_with_parent)


def _name_shared_memory() -> None:
    module: Any = shared_memory
    module._SHM_NAME_PREFIX = "/" + os.environ["TESTBED_SHARED_MEMORY"]


def _do_not_spin() -> None:
    """Readers of vLLM's shared memory sleep where they would yield, for a second after each message.

    They cannot do without: a notice that is sent while the last one is under way may be dropped.
    """
    from vllm.distributed.device_communicators import shm_broadcast  # noqa: PLC0415 - it is imported by what runs

    module: Any = shm_broadcast
    module.sched_yield = partial(time.sleep, 0.0005)


if __name__ == "__main__":
    _fork_only()
    _name_shared_memory()
    _do_not_spin()
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
