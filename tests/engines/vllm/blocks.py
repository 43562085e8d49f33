"""vLLM's KV cache manager, as far as kept turns of conversations and failed loads need it."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from kvd.engines.vllm.scheduler import SchedulerSide


@dataclass(eq=False)
class Block:
    block_id: int
    ref_cnt: int = 0
    block_hash: bytes | None = None

    @property
    def is_null(self) -> bool:
        return self.block_id == 0


@dataclass
class Manager:
    """Has the blocks of its pool, of which requests take some."""

    num_gpu_blocks: int = 64
    tables: dict[str, list[list[Block]]] = field(default_factory=dict)
    block_tokens: tuple[int, ...] = (32,)
    """Of each group."""
    watermark_blocks: int = 0
    lacks_blocks: bool = False

    def __post_init__(self) -> None:
        self.blocks = [Block(number) for number in range(self.num_gpu_blocks)]
        self.freed: list[int] = []
        self.block_pool = self.coordinator = self
        self.empty_kv_cache_blocks = SimpleNamespace(blocks=((),))

    def take(self, request: str, *ids: list[int]) -> tuple[list[int], ...]:
        """Gives a request blocks, a list for each group."""
        self.tables[request] = [[self.blocks[number] for number in group] for group in ids]
        for group in self.tables[request]:
            self.touch([block for block in group if not block.is_null])
        return ids

    def end(self, request: str) -> None:
        """VLLM frees a request's blocks."""
        for group in self.tables.pop(request, ()):
            self.free_blocks(block for block in group if not block.is_null)

    def free(self, request: Any) -> None:
        self.end(request.request_id)

    def allocate_slots(self, _request: Any) -> Any:
        """What `lacks_blocks` says; the tests give blocks by `take`."""
        return None if self.lacks_blocks else self.empty_kv_cache_blocks

    def get_blocks(self, request: str) -> Any:
        return SimpleNamespace(blocks=self.tables.get(request, []))

    def get_num_blocks_to_allocate(self, *, request_id: str, num_tokens: int, **_: Any) -> int:
        tables = self.tables.get(request_id, [[] for _ in self.block_tokens])
        each = zip(self.block_tokens, tables, strict=True)
        return sum(max(0, -(-num_tokens // tokens) - len(table)) for tokens, table in each)

    def get_num_free_blocks(self) -> int:
        return sum(block.ref_cnt == 0 for block in self.blocks[1:])

    def touch(self, blocks: Any) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, blocks: Any) -> None:
        for block in blocks:
            block.ref_cnt -= 1
            assert block.ref_cnt >= 0
            if block.ref_cnt == 0:
                self.freed.append(block.block_id)


def bind(engine: SchedulerSide, manager: Manager) -> None:
    """As vLLM does, whose steps here compute any request at once."""
    engine.bind(manager, step_tokens=1 << 40, lookahead=0)
