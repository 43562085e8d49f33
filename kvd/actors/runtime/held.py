"""Blocks of workers that nothing else may use, by what they stand for: counted as that changes, read by a scrape."""

from functools import partial
from typing import Final

from kvd.actors.runtime.blocks import Hold, Size
from kvd.metrics import Metrics

_NOTHING: Final = Size(0, 0)


class HeldBlocks:
    """How much is in each of the states `holds`, which this one alone counts."""

    def __init__(self, metrics: Metrics, holds: tuple[Hold, ...]) -> None:
        self._holds = holds
        self._sizes: dict[Hold, Size] = {}
        for hold in holds:
            # By a function: to set a gauge takes a lock and some microseconds, which each pull would pay.
            metrics.held_blocks.labels(hold).set_function(partial(self._blocks, hold))
            metrics.held_bytes.labels(hold).set_function(partial(self._bytes, hold))

    def move(self, size: Size, before: Hold | None, after: Hold | None) -> None:
        """Counts blocks in another state; None stands for blocks that are held no more, or not yet."""
        if not size.blocks:
            return
        if before is not None:
            blocks, total = self._sizes[before]
            if blocks == size.blocks:
                del self._sizes[before]
            else:
                self._sizes[before] = Size(blocks - size.blocks, total - size.bytes)
        if after is not None:
            blocks, total = self._sizes.get(after, _NOTHING)
            self._sizes[after] = Size(blocks + size.blocks, total + size.bytes)

    def report(self) -> dict[str, int]:
        """Blocks by state, as a status tells of them."""
        return {hold.value: self._blocks(hold) for hold in self._holds}

    def _blocks(self, hold: Hold) -> int:
        return self._sizes.get(hold, _NOTHING).blocks

    def _bytes(self, hold: Hold) -> int:
        return self._sizes.get(hold, _NOTHING).bytes
