"""Shards: which global heads and layers a rank of an engine holds, and which tokens of a block.

Ranks are numbered pipeline stage by stage, as engines do: rank = pp_rank * tp_size + tp_rank.
"""

import math
from collections.abc import Iterator

import msgspec


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's place in its engine. `stages` gives the layers (first, stop) of every pipeline stage.

    With context parallelism, `cp_size` neighbouring ranks that hold the same heads deal the tokens of each block out
    among them, in runs of equal length: the first run of a block is rank 0's of them.

    One rank's shard determines all others, so that each side can work out who reads from whom.
    """

    stages: tuple[tuple[int, int], ...]
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    cp_size: int = 1

    @property
    def rank(self) -> int:
        """The rank's number in its engine."""
        return self.pp_rank * self.tp_size + self.tp_rank

    @property
    def ranks(self) -> int:
        """How many ranks the engine has."""
        return len(self.stages) * self.tp_size

    @property
    def layers(self) -> range:
        """Global indexes of the layers of this rank's pipeline stage."""
        return range(*self.stages[self.pp_rank])

    def every_rank(self) -> Iterator["Shard"]:
        """The shards of all ranks of the engine, by rank."""
        for pp_rank in range(len(self.stages)):
            for tp_rank in range(self.tp_size):
                yield Shard(
                    stages=self.stages, tp_rank=tp_rank, tp_size=self.tp_size, pp_rank=pp_rank, cp_size=self.cp_size
                )

    def heads(self, total: int) -> range:
        """The global heads that this rank holds, of `total`.

        With more ranks than heads each head is held by tp_size / total neighbouring ranks (its replicas).
        """
        first = self.tp_rank * total // self.tp_size
        return range(first, first + max(1, total // self.tp_size))

    @property
    def cp_rank(self) -> int:
        """Which run of a block's tokens this rank holds."""
        return self.tp_rank % self.cp_size

    def replica(self, total: int) -> tuple[int, int]:
        """Which replica of its heads and tokens this rank is, and how many there are.

        (0, 1) unless ranks outnumber heads and runs.
        """
        holders = max(self.cp_size, self.tp_size // total)
        return self.tp_rank % holders // self.cp_size, holders // self.cp_size

    def shares_tokens(self, other: "Shard") -> bool:
        """Whether any token is held by both, if their runs are equally long."""
        return (self.cp_rank - other.cp_rank) % math.gcd(self.cp_size, other.cp_size) == 0
