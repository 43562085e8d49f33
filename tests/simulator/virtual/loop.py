"""Virtual time: the seed decides the order of callbacks, and the clock jumps to the next one.

Each process of the simulated world (a daemon, a worker) has a view of the loop of its own, which can be killed (nothing
of it ever runs again) and stopped as by SIGSTOP (its callbacks wait, time goes on).
"""

import heapq
from collections import deque
from collections.abc import Callable
from typing import Any

_MAX_CALLBACKS = 400_000
"""Callbacks per run; a run that needs more never becomes idle."""


class Handle:
    """A callback that will run unless it is cancelled or its process dies."""

    __slots__ = ("args", "callback", "cancelled", "process", "timed")

    def __init__(
        self,
        process: "Process | None",
        callback: Callable[..., object],
        args: tuple[Any, ...],
        *,
        timed: bool = False,
    ) -> None:
        self.process = process
        self.callback = callback
        self.args = args
        self.cancelled = False
        self.timed = timed
        """Whether it is a timer."""

    def cancel(self) -> None:
        self.cancelled = True


class VirtualLoop:
    """The clock of the world; has the interface of `kvd.actors.runtime.actor.Loop`, for what belongs to no process."""

    def __init__(self) -> None:
        self.now = 0.0
        self.callbacks = 0
        self.ready: deque[Handle] = deque()
        self._heap: list[tuple[float, int, Handle]] = []
        self.processes = 0
        self.alive: dict[int, Process] = {}
        """Processes that have not ended, by number."""
        self._pushes = 0

    def time(self) -> float:
        return self.now

    def call_soon(self, callback: Callable[..., object], *args: Any) -> Handle:
        """Calls back after the current callback, in order."""
        handle = Handle(None, callback, args)
        self.ready.append(handle)
        return handle

    def call_later(self, delay: float, callback: Callable[..., object], *args: Any) -> Handle:
        """Calls back in `delay` seconds; callbacks due at the same time run in the order of the calls."""
        return self.push(delay, Handle(None, callback, args))

    def push(self, delay: float, handle: Handle) -> Handle:
        """Puts a handle on the clock."""
        self._pushes += 1
        heapq.heappush(self._heap, (self.now + delay, self._pushes, handle))
        return handle

    def stand_still(self, seconds: float) -> None:
        """Time goes on and nothing runs, as for a process without a processor: what was due meanwhile runs late."""
        self.now += seconds

    def run_until(self, end: float) -> None:
        """Runs everything that is due up to and including `end`.

        Raises:
            RuntimeError: the world never becomes idle (callbacks call each other without time passing).

        """
        ready, heap = self.ready, self._heap
        while True:
            while ready:
                self._run(ready.popleft())
            if not heap or heap[0][0] > end:
                break
            due, _, handle = heapq.heappop(heap)
            self.now = max(self.now, due)
            self._run(handle)
        self.now = max(self.now, end)

    def _run(self, handle: Handle) -> None:
        if handle.cancelled:
            return
        process = handle.process
        if process is not None:
            if process.dead:
                return
            if process.paused:
                process.backlog.append(handle)
                return
        self.callbacks += 1
        if self.callbacks > _MAX_CALLBACKS:
            raise RuntimeError(f"more than {_MAX_CALLBACKS} callbacks; the last is {handle.callback}")
        handle.callback(*handle.args)


class Process:
    """One process's view of the loop; implements `kvd.actors.runtime.actor.Loop`."""

    def __init__(self, world: VirtualLoop, name: str) -> None:
        self.world = world
        self.name = name
        world.processes += 1
        self.pid = 1 + world.processes
        world.alive[self.pid] = self
        self.dead = False
        self.paused = False
        self.visible = True
        """Whether others see its number, and are told of its end."""
        self.on_death: list[Callable[[], None]] = []
        self.backlog: list[Handle] = []

    def time(self) -> float:
        return self.world.now

    def call_soon(self, callback: Callable[..., object], *args: Any) -> Handle:
        """Calls back after the current callback, in order."""
        handle = Handle(self, callback, args)
        self.world.ready.append(handle)
        return handle

    def call_later(self, delay: float, callback: Callable[..., object], *args: Any) -> Handle:
        """Calls back in `delay` seconds, or later if the process is stopped then."""
        return self.world.push(delay, Handle(self, callback, args, timed=True))

    def kill(self) -> None:
        """Runs nothing of this process from now on."""
        self.dead = True
        if self.world.alive.get(self.pid) is self:
            del self.world.alive[self.pid]
        self.backlog.clear()
        while self.on_death:
            self.on_death.pop()()

    def outlive(self, rest: "Process") -> None:
        """Ends all that this process does; `rest` is the same one and does what is left."""
        rest.on_death, self.on_death = self.on_death, []
        self.kill()
        del self.world.alive[rest.pid]
        rest.pid = self.pid
        self.world.alive[rest.pid] = rest

    def pause(self) -> None:
        self.paused = True

    def resume(self, *, timers_first: bool = False) -> None:
        """SIGCONT: runs what was due meanwhile, in order; `timers_first`, before it reads its sockets."""
        self.paused = False
        if timers_first:
            self.backlog.sort(key=lambda handle: not handle.timed)
        self.world.ready.extend(self.backlog)
        self.backlog.clear()
