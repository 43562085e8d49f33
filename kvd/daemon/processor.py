"""How long the daemon's threads waited for a processor, as the kernel counts it: for what others are at fault.

Those of the process that reads from other hosts count, too.
"""

import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from kvd import limits
from kvd.actors.runtime.actor import Loop
from kvd.metrics import Metrics
from kvd.protocol.status import ProcessorStatus

_TASKS: Final = Path("/proc/self/task")
_LOOK_SECONDS: Final = 1.0
_FRESH_SECONDS: Final = 0.05
"""How old the last look may be when something was late: thousands of pulls may fail at one moment."""
_NANOSECOND: Final = 1e-9
_TRANSPORT: Final = "transport"
_OTHER: Final = "other"
_KINDS: Final = ("loop", "copy", _TRANSPORT, "import", "http", _OTHER)


class ProcessorWait:
    """Looks once a second, and remembers the last `limits.STARVED_WINDOW_SECONDS`.

    A wait is seen when it is over: until then the kernel has not counted it. `network` gives the number of the process
    that reads from other hosts, if one runs.
    """

    def __init__(
        self, loop: Loop, metrics: Metrics, tasks: Path = _TASKS, network: Callable[[], int | None] = lambda: None
    ) -> None:
        self._loop = loop
        self._counter = metrics.processor_wait
        self._tasks = tasks
        self._network = network
        self._seen: dict[int, int] = {}
        """Nanoseconds that each thread has waited, by its number."""
        self._sum: Counter[str] = Counter()
        """Nanoseconds by kind of thread."""
        self._past: deque[tuple[float, Counter[str]]] = deque()
        """When it looked, and `_sum` then."""
        self.look()

    def look(self) -> None:
        """Looks now and once a second from then on."""
        self._look()
        self._loop.call_later(_LOOK_SECONDS, self.look)

    def _look(self) -> None:
        self._count()
        now = self._loop.time()
        self._past.append((now, self._sum.copy()))
        while len(self._past) > 1 and self._past[1][0] <= now - limits.STARVED_WINDOW_SECONDS:
            self._past.popleft()

    def status(self, seconds: float = limits.STARVED_WINDOW_SECONDS) -> ProcessorStatus:
        """Of the last `seconds` and up to `_LOOK_SECONDS` more, as far as it remembers, as of the last look."""
        ended, after = self._past[-1]
        began, before = next((each for each in reversed(self._past) if each[0] <= ended - seconds), self._past[0])
        waited = {kind: round((after[kind] - before[kind]) * _NANOSECOND, 3) for kind in _KINDS if kind in after}
        return ProcessorStatus(round(ended - began, 3), waited)

    def starved(self, seconds: float) -> str:
        """What to say of something that was late in the last `seconds`: how long was waited, if that was long.

        Its deadline may be the first that the loop comes to after a wait, before it looks again.
        """
        if self._loop.time() - self._past[-1][0] >= _FRESH_SECONDS:
            self._look()
        status = self.status(seconds)
        return f"{status.text} (this daemon's)" if status.starved else ""

    def _count(self) -> None:
        kinds = {thread.native_id: _kind(thread) for thread in threading.enumerate()}
        found = [(number, waited, kinds.get(number, _OTHER)) for number, waited in _waits(self._tasks)]
        if (network := self._network()) is not None:
            found += [(number, waited, _TRANSPORT) for number, waited in _waits(Path(f"/proc/{network}/task"))]
        for number, waited, kind in found:
            new = max(0, waited - self._seen.get(number, 0))  # a number may be given to another thread
            self._sum[kind] += new
            self._counter.labels(kind).inc(new * _NANOSECOND)
        self._seen = {number: waited for number, waited, _ in found}


def _waits(tasks: Path) -> Iterator[tuple[int, int]]:
    """The number of each thread, and for how many nanoseconds it has waited."""
    try:
        numbers = os.listdir(tasks)
    except OSError:  # the process has ended
        return
    for number in numbers:
        try:
            _, waited, runs = (tasks / number / "schedstat").read_text().split()
        except OSError:  # it has ended, or this kernel does not count
            continue
        if runs != "0":  # it has not run yet; or this kernel does not count, and says 0 of all threads
            yield int(number), int(waited)


def _kind(thread: threading.Thread) -> str:
    if thread is threading.main_thread():
        return "loop"
    name = thread.name.removeprefix("kvd-").partition("_")[0]  # those of a pool have a number
    return name if name in _KINDS else _OTHER
