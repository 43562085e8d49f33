"""Ways to have many things done later: a few calls for all of them, or one timer."""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Hashable
from itertools import islice
from typing import Generic, TypeVar

from kvd import limits
from kvd.actors.runtime.actor import Actor, Loop, Timer

T = TypeVar("T", bound=Hashable)


class Batch(Generic[T]):
    """Collects items, and has `actor` call `handle` with some of them at a time, in order; each is in it once.

    What one call of `handle` causes goes ahead of the next, and sockets are read in between. `blocks_of` says how many
    blocks have to do with an item, if that decides how long it takes: one call gets items of up to
    `limits.BATCH_BLOCKS`, or one item.
    """

    def __init__(
        self, actor: Actor, handle: Callable[[list[T]], None], blocks_of: Callable[[T], int] = lambda _item: 0
    ) -> None:
        self._actor = actor
        self._handle = handle
        self._blocks_of = blocks_of
        self._items: OrderedDict[T, None] = OrderedDict()
        self._called = False

    def put(self, item: T) -> None:
        """Adds an item; one that waits already keeps its place."""
        self._items[item] = None
        if not self._called:
            self._called = True
            self._actor.call(self._handle_some)

    def defer(self, item: T) -> None:
        """Has an item that waits handled behind all others."""
        if item in self._items:
            self._items.move_to_end(item)

    def _handle_some(self) -> None:
        try:
            self._handle(self._take())
        finally:  # whatever becomes of these, the others are handled
            self._called = bool(self._items)
            if self._called:
                # a call that waits already would come before sockets are read
                self._actor.later(0.0, self._handle_some)

    def _take(self) -> list[T]:
        taken: list[T] = []
        blocks = 0
        for item in islice(self._items, limits.BATCH_ITEMS):
            blocks += self._blocks_of(item)
            if taken and blocks > limits.BATCH_BLOCKS:
                break
            taken.append(item)
        for item in taken:
            del self._items[item]
        return taken


K = TypeVar("K", bound=Hashable)

_EXACT = 1e-4
"""Seconds by which a timer of a loop that does nothing else is late."""


class Deadlines(Generic[K]):
    """Calls `expired(key)` once the deadline of `key` has passed, unless it was moved or unset before.

    `for_others` says that they are deadlines for what others send. If this process stood still, that may have come in
    time and wait in a socket, as timers run before sockets are read: each deadline gets a moment more then, once. How
    late its timer is does not tell how long that was: it may have come up just before the end.
    """

    def __init__(self, loop: Loop, expired: Callable[[K], None], *, for_others: bool = False) -> None:
        self._loop = loop
        self._expired = expired
        self._for_others = for_others
        self._put_off: set[K] = set()
        self._deadlines: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._pushes = 0
        self._timer: Timer | None = None
        self._timer_at = 0.0

    def __len__(self) -> int:
        return len(self._deadlines)

    def __contains__(self, key: K) -> bool:
        return key in self._deadlines

    def set(self, key: K, deadline: float) -> None:
        """Sets or moves the deadline of `key` (seconds on the loop's clock)."""
        self._put_off.discard(key)
        moved_later = self._deadlines.get(key, deadline + 1.0) <= deadline
        self._deadlines[key] = deadline
        if moved_later:
            return  # its entry in the heap is moved when it comes up
        self._push(key, deadline)
        if len(self._heap) > 64 + 4 * len(self._deadlines):
            self._compact()
        self._arm()

    def unset(self, key: K) -> None:
        """Drops the deadline of `key`, if it has one."""
        self._deadlines.pop(key, None)
        self._put_off.discard(key)

    def _push(self, key: K, deadline: float) -> None:
        self._pushes += 1
        heapq.heappush(self._heap, (deadline, self._pushes, key))

    def _compact(self) -> None:
        self._heap.clear()
        for key, deadline in self._deadlines.items():
            self._push(key, deadline)

    def _arm(self) -> None:
        if not self._heap:
            return
        first = self._heap[0][0]
        if self._timer is not None:
            if self._timer_at <= first:
                return
            self._timer.cancel()
        self._timer_at = first
        self._timer = self._loop.call_later(max(0.0, first - self._loop.time()), self._wake)

    def _is_due(self, now: float) -> bool:
        return bool(self._heap) and self._heap[0][0] <= now

    def _wake(self) -> None:
        now = self._loop.time()
        late = now - self._timer_at
        stood_still = self._for_others and late > _EXACT
        moment = limits.CATCH_UP_SECONDS if late > limits.STANDSTILL_SECONDS else limits.LAST_LOOK_SECONDS
        self._take(now, moment if stood_still else 0.0)

    def _take(self, now: float, moment: float) -> None:
        """Ends what is due at `now`, or puts it off once by `moment`: some at a time, sockets are read in between."""
        self._timer = None
        due: list[K] = []
        for _ in range(limits.BATCH_ITEMS):
            if not self._is_due(now):
                break
            _, _, key = heapq.heappop(self._heap)
            deadline = self._deadlines.get(key)
            if deadline is None:
                continue
            if deadline > now:
                self._push(key, deadline)
            elif moment and key not in self._put_off:
                self._put_off.add(key)
                self._deadlines[key] = now + moment
                self._push(key, self._deadlines[key])
            else:
                del self._deadlines[key]
                self._put_off.discard(key)
                due.append(key)
        if self._is_due(now):
            self._timer_at = self._heap[0][0]
            self._timer = self._loop.call_later(0.0, self._take, now, moment)
        else:
            self._arm()
        for key in due:
            self._expired(key)
