"""Checks what daemons say of themselves in their welcomes, and reads the specs in them beside the loop.

Reading a spec takes up to 35 ms. One is read at a time, and parties take turns: one that sends many, by however many
links, delays only itself.
"""

from collections.abc import Callable
from functools import partial
from typing import Final

from msgspec import Struct, field

from kvd import limits
from kvd.actors.runtime.actor import Actor, Background
from kvd.actors.runtime.pools import PeerPool
from kvd.errors import ErrorCode, KvdError, refusal
from kvd.layout import CacheSpec
from kvd.net.priority_slots import PrioritySlots
from kvd.protocol.peer import PoolInfo, Welcome

_ADDRESSES: Final = 1 << 63
"""User-space addresses lie below it; above are the kernel's, and sums of two would not fit into 64 bits."""
_KNOWN_SPECS: Final = 16
"""Specs that are kept decoded: the ranks of an engine, and its replicas, describe their pools alike."""

SpeaksFor = Callable[[str, str], bool]
"""Whether a peer's public key (hexadecimal, empty without CURVE) is that of the daemon of this name."""


def anybody(_key: str, _daemon: str) -> bool:
    """Believes every name: without keys nothing can be checked."""
    return True


def check_welcome(welcome: Welcome, key: str, speaks_for: SpeaksFor) -> None:
    """Checks that the peer with `key` may be the daemon it says, and that its memory can be where it says.

    Raises:
        BadRequest: `NOT_PERMITTED`, the name or the agent is another daemon's; `BAD_POOL`, no memory can be there.

    """
    daemon, agent = welcome.daemon, welcome.agent
    if not speaks_for(key, daemon):
        raise refusal(ErrorCode.NOT_PERMITTED, f"its key is not that of {daemon!r}; see `curve_peers` here")
    if not agent.startswith(f"{daemon}#"):
        raise refusal(ErrorCode.NOT_PERMITTED, f"the agent {agent!r} is not one of {daemon!r}")
    _check_memory("its stamps", welcome.stamps, limits.MAX_STAMPS * limits.STAMP_BYTES)
    for info in welcome.pools:
        _check_memory(f"pool {info.pool!r}", info.base, info.size)
    if len({info.pool for info in welcome.pools}) < len(welcome.pools):
        raise refusal(ErrorCode.BAD_POOL, "it names a pool twice")


def _check_memory(what: str, base: bytes, size: int) -> None:
    end = int.from_bytes(base, "little") + size
    if end > _ADDRESSES:
        raise refusal(ErrorCode.BAD_POOL, f"{what} would end at {end:#x}, where no memory can be")


class _Reading(Struct, eq=False):
    welcome: Welcome
    party: str
    left: list[PoolInfo]
    pools: dict[str, PeerPool] = field(default_factory=dict)


class Introductions:
    """Welcomes whose specs are being read, by link; `introduced` is called with a welcome and its pools or an error."""

    def __init__(
        self,
        background: Background,
        actor: Actor,
        introduced: Callable[[int, Welcome, dict[str, PeerPool] | KvdError], None],
    ) -> None:
        self._background = background
        self._actor = actor
        self._introduced = introduced
        self._readings: dict[int, _Reading] = {}
        self._slots: PrioritySlots[int] = PrioritySlots(1)
        """Links: one whose spec is being read, and those that wait for that."""
        self._specs: dict[bytes, CacheSpec] = {}

    def __contains__(self, link: int) -> bool:
        return link in self._readings

    def read(self, link: int, welcome: Welcome, party: str) -> None:
        """Reads the specs of a welcome, in turn with those of other parties."""
        if not welcome.pools:
            self._introduced(link, welcome, {})
            return
        self._readings[link] = _Reading(welcome, party, list(welcome.pools))
        if link not in self._slots:  # else it goes on once the thread has read a spec of the welcome before
            self._go_on(link)

    def forget(self, link: int) -> None:
        """Drops the welcome of a peer that is not being greeted any more."""
        self._readings.pop(link, None)
        if link not in self._slots:  # else its slot is free once the thread has read that spec
            self._slots.forget(link)

    def _go_on(self, link: int) -> None:
        if self._is_left(link) and self._slots.enter(link, (self._readings[link].party,)):
            self._read(link)

    def _is_left(self, link: int) -> bool:
        """Takes the specs of a welcome that are known; whether there is one then that is to be read."""
        while (reading := self._readings.get(link)) is not None and reading.left[-1].spec in self._specs:
            self._add(link, reading, self._specs[reading.left[-1].spec])
        return reading is not None

    def _read(self, link: int) -> None:
        info = self._readings[link].left[-1]
        work = partial(CacheSpec.decode, info.spec)
        self._background(work, lambda result: self._actor.call(self._take, link, info, result))

    def _take(self, link: int, info: PoolInfo, result: CacheSpec | KvdError) -> None:
        """One spec is read; the next one is another party's."""
        self._slots.leave(link)
        if isinstance(result, CacheSpec):
            self._specs[info.spec] = result
            if len(self._specs) > _KNOWN_SPECS:
                del self._specs[next(iter(self._specs))]
        self._actor.call(self._next)
        self._actor.call(self._go_on, link)  # behind the other one
        reading = self._readings.get(link)
        if reading is not None and reading.left[-1] is info:
            self._add(link, reading, result)

    def _next(self) -> None:
        """Goes on with those that wait until a spec is to be read: each in a call, as a defect costs that one."""
        if (link := self._slots.next()) is not None:
            self._slots.leave(link)
            self._actor.call(self._next)
            self._go_on(link)

    def _add(self, link: int, reading: _Reading, result: CacheSpec | KvdError) -> None:
        info = reading.left.pop()
        if isinstance(result, CacheSpec) and result.pool_bytes > info.size:
            text = f"pool {info.pool!r} has {info.size} bytes, its spec speaks of {result.pool_bytes}"
            result = refusal(ErrorCode.BAD_SPEC, text)
        if isinstance(result, CacheSpec):
            reading.pools[info.pool] = PeerPool(info.epoch, int.from_bytes(info.base, "little"), info.size, result)
            if reading.left:
                return
        del self._readings[link]
        self._introduced(link, reading.welcome, result if isinstance(result, KvdError) else reading.pools)
