"""Which request holds which blocks of an engine. All ranks share one table of block ids."""

from collections import deque


class BlockManager:
    """Allocates blocks to requests."""

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self._free = deque(range(num_blocks))
        self._tables: dict[str, list[int]] = {}

    def blocks_for(self, tokens: int) -> int:
        """How many blocks hold `tokens` tokens."""
        return -(-tokens // self.block_tokens)

    def can_allocate(self, tokens: int) -> bool:
        """Whether there are free blocks for `tokens` tokens."""
        return self.blocks_for(tokens) <= len(self._free)

    def allocate(self, request: str, tokens: int) -> list[int]:
        """The block table of a new request, with room for `tokens` tokens; call `can_allocate` first."""
        if request in self._tables:
            raise ValueError(f"request {request!r} holds blocks already")
        if not self.can_allocate(tokens):
            raise ValueError(f"{request!r} needs {self.blocks_for(tokens)} blocks, {len(self._free)} are free")
        table = [self._free.popleft() for _ in range(self.blocks_for(tokens))]
        self._tables[request] = table
        return table

    def free(self, request: str) -> None:
        """Frees the blocks of a request."""
        self._free.extend(self._tables.pop(request))

    def check_integrity(self) -> None:
        """Checks that every block is free or belongs to one request."""
        held = [block for table in self._tables.values() for block in table]
        if sorted([*self._free, *held]) != list(range(self.num_blocks)):
            raise AssertionError(f"blocks are lost or held twice: free {list(self._free)}, held {self._tables}")
