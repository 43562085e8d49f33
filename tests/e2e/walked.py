"""Runs a Python program and notes what it passes: `python walked.py OUT PYTHON -m MODULE ARGUMENTS`.

SIGUSR1 begins, and the notification to a worker after a read has landed ends. After SIGUSR2, OUT has what ran between,
as JSON: the files of kvd whose functions ran in any thread, the types of kvd that had methods called or were given to
functions, and the calls that waited in mailboxes.
"""

import json
import os
import runpy
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from kvd.actors.scheduler import peer_requests

_ROOT = str(Path(__file__).resolve().parents[2] / "kvd") + os.sep


_LANDED = "scheduler: Transfers.landed"


class Walk:
    def __init__(self) -> None:
        self.on = False
        self.files: set[str] = set()
        self.types: set[str] = set()
        self.calls: list[str] = []

    def begin(self, *_: Any) -> None:
        self.files, self.types, self.calls, self.on = set(), set(), [], True

    def end(self, out: Path) -> None:
        self.on = False
        found = {"files": sorted(self.files), "types": sorted(self.types), "calls": self.calls}
        ready = out.with_suffix(".tmp")
        ready.write_text(json.dumps(found, indent=1))
        ready.rename(out)

    def profile(self, frame: FrameType, event: str, _argument: Any) -> None:
        code = frame.f_code
        if not self.on or not code.co_filename.startswith(_ROOT):
            return
        if event == "call":
            self.files.add(code.co_filename.removeprefix(_ROOT))
            given = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            self.types.update(filter(None, (_name(frame.f_locals.get(name)) for name in given)))
        if event == "call" and code.co_qualname == "Dispatcher.put":
            method = frame.f_locals["method"]
            method = getattr(method, "func", method)  # of a partial
            self.calls.append(f"{frame.f_locals['actor'].name}: {method.__qualname__}")
        # One before that tells of something else, such as an acknowledgement that came late.
        if event == "return" and code.co_qualname == "CompletionActor._flush" and _LANDED in self.calls:
            self.on = False


def _name(value: object) -> str:
    kind = value if isinstance(value, type) else type(value)
    return f"{kind.__module__}.{kind.__qualname__}" if kind.__module__.startswith("kvd.") else ""


def main() -> None:
    _, out, _python, _module, module, *arguments = sys.argv
    walk = Walk()
    peer_requests.CLAIM_AFTER = 60.0  # a read that lasts is claimed, and on a busy machine a small one may last
    signal.signal(signal.SIGUSR1, walk.begin)
    signal.signal(signal.SIGUSR2, lambda *_: walk.end(Path(out)))
    threading.setprofile(walk.profile)
    sys.setprofile(walk.profile)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
