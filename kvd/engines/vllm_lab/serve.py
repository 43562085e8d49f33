"""vLLM's API server with no orphans: `python -m kvd.engines.vllm_lab.serve FLAGS` dies with whoever started it.

vLLM runs its engine in a process of its own, which outlives a server that is killed. Here the kernel kills every
process of a server with its parent: multiprocessing imports this file in the new process, or forks it.
"""

import ctypes
import os
import runpy
import signal

_PR_SET_PDEATHSIG = 1


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:
        os._exit(1)


_die_with_parent()
os.register_at_fork(after_in_child=_die_with_parent)

if __name__ == "__main__":
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
