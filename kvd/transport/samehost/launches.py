"""Small reads within GPUs: the loop launches them, and looks for a moment whether they have landed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Final

from kvd.errors import DeviceError
from kvd.transport.interface import Event, TransportDied

if TYPE_CHECKING:
    from kvd.transport.samehost.copies import Read
    from kvd.transport.samehost.gpu import SmallCopies

_LOOKING: Final = 60e-6
"""Seconds in which a small copy within a GPU that has nothing else to do has landed: 17 us on one machine with an H100,
38 on another (`python -m benchmarks.gpu`). What an engine's kernels keep longer, a thread waits for."""


class Launches:
    """One read at a time; `deliver` takes its end, on the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, deliver: Callable[[Event], None]) -> None:
        self._loop = loop
        self._deliver = deliver
        self._read: Read | None = None
        self._calls: list[Callable[[], None]] = []
        """What waits for its end."""
        self._waits = ThreadPoolExecutor(1, "kvd-gpu")
        self._stopped = False

    @property
    def busy(self) -> bool:
        """Whether a read is under way."""
        return self._read is not None

    def start(self, read: Read, gpu: SmallCopies) -> None:
        """Lets a GPU copy it. That may take any time beside an engine's kernels, and the loop does not wait."""
        self._read = read
        try:
            read.launch(gpu)
            while not gpu.have_landed():  # asked even if the driver refused: it may have launched all the same
                if time.perf_counter() - read.started > _LOOKING:
                    waiting = self._loop.run_in_executor(self._waits, gpu.wait)
                    waiting.add_done_callback(partial(self._waited, read))
                    return
        except Exception as error:  # noqa: BLE001 - whatever it is, the GPU may still copy
            self._end(read, error)
        else:
            self._end(read)

    def when_idle(self, call: Callable[[], None]) -> None:
        """Calls it once no read is under way."""
        if self._read is None:
            call()
        else:
            self._calls.append(call)

    def stop(self) -> None:
        """Waits for the read that is under way; nothing is said of it any more."""
        self._stopped = True
        self._waits.shutdown(wait=True)

    def _waited(self, read: Read, waiting: asyncio.Future[None]) -> None:
        if not waiting.cancelled() and not self._stopped:
            self._end(read, waiting.exception())

    def _end(self, read: Read, error: BaseException | None = None) -> None:
        """Ends the read, unless the GPU may still copy: then the daemon ends, and with it what the GPU does for it."""
        if isinstance(error, DeviceError):
            read.fail(error)
        elif error is not None:
            self._deliver(TransportDied(f"a copy of a GPU raised {type(error).__name__}: {error}"))
            return
        self._read = None
        calls, self._calls = self._calls, []
        for call in calls:
            call()
        self._deliver(read.end())
        if read.device_lost:
            self._deliver(TransportDied(read.failure))
