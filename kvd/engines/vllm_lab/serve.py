"""vLLM's API server with no orphans: `python -m kvd.engines.vllm_lab.serve FLAGS`.

It dies with whoever started it. vLLM runs its engine and each worker in a process of its own, which outlive a server
that is killed; here the kernel kills every process of a server with its parent. On a CPU each of them is a new
interpreter, which imports vLLM for eight seconds; here they are forked, as vLLM does it on a GPU. And engine and worker
wait for each other in loops that yield the core; where there are fewer cores than such loops, whatever else wants to
run has been seen to wait for seconds. Here they sleep for a moment instead.
"""

import ctypes
import multiprocessing
import os
import runpy
import signal
import time
from multiprocessing import resource_tracker
from typing import Any

_PR_SET_PDEATHSIG = 1

_MOMENT_SECONDS = 0.0001
"""Between two looks of a waiting engine or worker: 1% of the time that a step takes."""


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:
        os._exit(1)


def _fork_only() -> None:
    fork: Any = multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda method=None: fork  # noqa: ARG005
    resource_tracker.ensure_running()  # by the engine it would be killed, before it has removed the shared memory


def _sleep_instead_of_yielding() -> None:
    os.sched_yield = lambda: time.sleep(_MOMENT_SECONDS)


_die_with_parent()
os.register_at_fork(after_in_child=_die_with_parent)

if __name__ == "__main__":
    _fork_only()
    _sleep_instead_of_yielding()
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
