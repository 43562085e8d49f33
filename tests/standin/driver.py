"""The stand-in driver as a test sees it: what a process needs to use it, and the settings that it obeys."""

import ctypes
import mmap
import os
import re
import struct
from pathlib import Path
from types import TracebackType

from tests.standin.build import SOURCES

_SETTINGS = re.findall(r"^SETTING\((\w+), (\d+),", (SOURCES / "settings.def").read_text(), re.MULTILINE)
_NAMES = [name for name, _ in _SETTINGS]
_COUNTERS = (SOURCES / "counters.def").read_text()


class StandinDriver:
    """A machine with stand-in GPUs. Processes with its `environment` use them.

    `set()` changes the machine at once, also for processes that run; `driver/settings.def` lists what can be set.
    """

    def __init__(self, libraries: Path, control: Path) -> None:
        control.write_bytes(b"".join(int(value).to_bytes(8, "little") for _, value in _SETTINGS))
        with control.open("r+b") as file:
            self._shared = mmap.mmap(file.fileno(), 0)
        self._fields = (ctypes.c_uint64 * len(_SETTINGS)).from_buffer(self._shared)
        self.environment = {"LD_LIBRARY_PATH": os.fspath(libraries), "STANDIN_CONTROL": os.fspath(control)}

    def set(self, **values: int) -> None:
        """Raises ValueError for a name that is no setting."""
        for name, value in values.items():
            self._fields[_NAMES.index(name)] = value

    def __enter__(self) -> "StandinDriver":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        del self._fields
        self._shared.close()


def change(**values: int) -> None:
    """Like `StandinDriver.set`, from a process that has the driver."""
    with open(os.environ["STANDIN_CONTROL"], "r+b") as file, mmap.mmap(file.fileno(), 0) as shared:
        for name, value in values.items():
            struct.pack_into("=Q", shared, 8 * _NAMES.index(name), value)


def _read(function: str, kind: str) -> dict[str, int]:
    names = re.findall(rf"^{kind}\((\w+)\)", _COUNTERS, re.MULTILINE)
    numbers = (ctypes.c_uint64 * len(names))()
    getattr(ctypes.CDLL("libcuda.so.1"), function)(numbers)
    return dict(zip(names, numbers, strict=True))


def work() -> dict[str, int]:
    """What this process's driver has done so far."""
    return _read("standin_counts", "WORK")


def live() -> dict[str, int]:
    """What this process has got from its driver and has not given back."""
    return _read("standin_live", "LIVE")
