"""An open read of another host's pool: its slices on their way, the boards that decide them, the peers they are of."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

from kvd.transport.interface import ReadRequest
from kvd.transport.slices import U64, Slice
from kvd.transport.staged.messages import StagedPool


class Step(Enum):
    """How far a slice is."""

    ASKED = auto()
    READ = auto()
    CHECKED = auto()
    COPIED = auto()


AT_REST: Final = (Step.ASKED, Step.CHECKED)
"""Nothing writes for a slice that waits for the board."""


@dataclass(slots=True, eq=False)
class Read:
    """An open read; `board` is that of the peer's pool if it is read by windows. `parts` of it are on their way."""

    request: ReadRequest
    peer: StagedPeer
    board: Board | None
    into_gpu: bool
    parts: set[Part] = field(default_factory=set)
    started: float = 0.0
    failure: str = ""
    aborted: bool = False


@dataclass(slots=True, eq=False)
class Part:
    """A slice on its way.

    `number` is its request's, `looks` how many the board had had when it began to wait. It is asked for again at
    `again`, unless its bytes are there `patience` seconds after it was asked for.
    """

    read: Read
    piece: Slice
    slot: int | None = None
    step: Step = Step.ASKED
    number: int = 0
    window: int = 0
    looks: int = 0
    again: float = 0.0
    patience: float = 0.0

    @property
    def rows(self) -> tuple[U64, U64, U64]:
        """(source, destination, bytes) of its descriptors."""
        part = slice(self.piece.start, self.piece.stop)
        chunk = self.piece.chunk
        return chunk.src[part], chunk.dst[part], chunk.length[part]


@dataclass(slots=True, eq=False)
class Board:
    """The board of a pool of a peer, as it was announced; `waiting` are slices that it decides.

    `secret` is ours with that peer.
    """

    agent: str
    pool: StagedPool
    secret: bytes
    waiting: set[Part] = field(default_factory=set)
    looks: int = 0
    looking: bool = False


@dataclass(slots=True, eq=False)
class StagedPeer:
    """A peer that has or had staged pools, or that we read into a GPU. `boards` are by address of the peer's pools."""

    agent: str
    secret: bytes
    """Ours with this peer."""
    boards: dict[int, Board] = field(default_factory=dict)
    reads: set[int] = field(default_factory=set)

    def learn(self, staged: dict[int, StagedPool]) -> None:
        """What is read from now on is read of these pools."""
        before = {board.pool: board for board in self.boards.values()}
        self.boards = {base: before.get(pool) or Board(self.agent, pool, self.secret) for base, pool in staged.items()}
