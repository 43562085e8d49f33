"""SGLang's server on the CPU: `python -m tests.sglang.testbed.serve FLAGS`.

It dies with whoever started it, and so do its scheduler and detokenizer, which are forked: as SGLang starts them each
would import all of it again, and none would have the stand-ins for absent modules.
"""

import ctypes
import multiprocessing
import os
import runpy
import signal
from typing import Any

from tests.sglang.testbed.absent import stand_in

_PR_SET_PDEATHSIG = 1


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:
        os._exit(1)


def _fork_only() -> None:
    module: Any = multiprocessing
    module.set_start_method = lambda *_args, **_kwargs: None


_die_with_parent()
os.register_at_fork(after_in_child=_die_with_parent)

if __name__ == "__main__":
    stand_in()
    _fork_only()
    runpy.run_module("sglang.launch_server", run_name="__main__")
