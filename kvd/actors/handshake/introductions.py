"""Checks what daemons say of themselves in their welcomes, and reads the specs in them beside the loop.

Parties take turns at that: one that sends many specs, by however many links, delays only itself.
"""

from collections.abc import Callable
from functools import partial
from typing import Final

from msgspec import Struct, field

from kvd import limits
from kvd.actors.runtime.actor import Actor, Background
from kvd.actors.runtime.pools import PeerPool
from kvd.actors.runtime.specs import SpecReader
from kvd.errors import ErrorCode, KvdError, refusal
from kvd.layout import CacheSpec
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
        self._introduced = introduced
        self._readings: dict[int, _Reading] = {}
        self._reader = SpecReader(background, actor, _KNOWN_SPECS)

    def __contains__(self, link: int) -> bool:
        return link in self._readings

    def read(self, link: int, welcome: Welcome, party: str) -> None:
        """Reads the specs of a welcome, in turn with those of other parties."""
        if not welcome.pools:
            self._introduced(link, welcome, {})
            return
        self._readings[link] = _Reading(welcome, party, list(welcome.pools))
        if link not in self._reader:  # else it goes on once a spec of the welcome before is read
            self._go_on(link)

    def forget(self, link: int) -> None:
        """Drops the welcome of a peer that is not being greeted any more."""
        self._readings.pop(link, None)
        self._reader.forget(link)

    def _go_on(self, link: int) -> None:
        """Takes the specs of a welcome that are known, and has the next one read."""
        while (reading := self._readings.get(link)) is not None:
            info = reading.left[-1]
            known = self._reader.known(info.spec)
            if known is None:
                self._reader.read(link, reading.party, info.spec, partial(self._take, link, info))
                return
            self._add(link, reading, known)

    def _take(self, link: int, info: PoolInfo, result: CacheSpec | KvdError) -> None:
        reading = self._readings.get(link)
        if reading is not None and reading.left[-1] is info:
            self._add(link, reading, result)
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
