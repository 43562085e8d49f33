"""SGLang's server on the CPU: `python -m tests.sglang.testbed.serve FLAGS`.

It dies with whoever started it, and so do its scheduler and detokenizer, which are forked: as SGLang starts them each
would import all of it again, and none would have the stand-ins for absent modules. With `KVD_TEST_HOST_MEMORY` SGLang's
backend `nixl` registers the memory of its KV cache, which it takes for a GPU's, as what it is here. Its scheduler does
not spin while a request waits for its transfer: the servers of a test share as few as two cores.
"""

import ctypes
import importlib
import multiprocessing
import os
import runpy
import signal
import time
from collections.abc import Callable
from typing import Any, Final

_PR_SET_PDEATHSIG = 1

HOST_MEMORY: Final = "KVD_TEST_HOST_MEMORY"
"""If this environment variable is set."""


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:
        os._exit(1)


def _fork_only() -> None:
    module: Any = multiprocessing
    module.set_start_method = lambda *_args, **_kwargs: None


def _host_memory() -> None:
    """SGLang's own code stays as it is: NIXL's agent is told of another kind of memory."""
    from nixl import _api  # noqa: PLC0415 - only for this backend

    for name in ("register_memory", "get_xfer_descs", "get_reg_descs", "prep_xfer_dlist"):
        setattr(_api.nixl_agent, name, _of_host(getattr(_api.nixl_agent, name)))


def _do_not_spin() -> None:
    from sglang.srt.managers.scheduler import Scheduler  # noqa: PLC0415 - it needs the stand-ins

    look_after = Scheduler.on_idle

    def on_idle(scheduler: Any) -> None:
        look_after(scheduler)
        time.sleep(0.001)

    Scheduler.on_idle = on_idle


def _of_host(method: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        kinds = {"VRAM": "DRAM"}
        return method(
            *(kinds.get(each, each) if isinstance(each, str) else each for each in args),
            **{name: kinds.get(each, each) if isinstance(each, str) else each for name, each in kwargs.items()},
        )

    return called


if __name__ == "__main__":
    _die_with_parent()
    os.register_at_fork(after_in_child=_die_with_parent)
    importlib.import_module("tests.sglang.testbed.imported")
    _fork_only()
    _do_not_spin()
    if HOST_MEMORY in os.environ:
        _host_memory()
    runpy.run_module("sglang.launch_server", run_name="__main__")
