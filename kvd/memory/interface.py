"""What the daemon needs of memory: pools that it owns and lends to other processes."""

from typing import Protocol


class Memory(Protocol):
    """One mapped pool."""

    @property
    def base(self) -> int:
        """Address of the first byte in this process."""

    @property
    def size(self) -> int:
        """Bytes that the worker asked for; the mapping may be longer (whole pages)."""

    @property
    def length(self) -> int:
        """Bytes of the mapping: whole pages, of a GPU whole granules. Importers of a GPU's memory map exactly these."""

    @property
    def device(self) -> str:
        """The UUID of the GPU that has it, as `nvidia-smi -L` shows it (`GPU-...`); empty for host memory."""

    @property
    def backing(self) -> str:
        """Its pages: `hugetlb`, `thp` or `plain`; `cuda` for a GPU's memory."""

    @property
    def descriptor(self) -> int:
        """The file descriptor that a worker maps; this object owns it."""

    def move(self) -> None:
        """Maps the pool, with its bytes, at another address of this process; the old address reads as zeros.

        Raises:
            Unavailable: `OVERLOADED`, it cannot be mapped a second time and stays where it is.

        """

    def close(self) -> None:
        """Unmaps and closes. The bytes live on while another process has them mapped."""

    def free(self) -> None:
        """Like `close`, and others that map it find zeros there. Slow; not for the loop.

        Host memory is free at once; a GPU's when the last process that has mapped it unmaps it.
        """


class MemoryProvider(Protocol):
    """Makes pools."""

    @property
    def device(self) -> str:
        """As `Memory.device`, of all its pools."""

    def footprint(self, size: int) -> int:
        """Bytes of memory that a pool of `size` bytes takes: whole pages."""

    def allocate(self, name: str, size: int) -> Memory:
        """A new pool of `size` bytes, zeroed and faulted in.

        Raises:
            NoMemory: there is too little.

        """

    def adopt(self, descriptor: int, size: int) -> Memory:
        """The pool behind `descriptor`, which a worker kept from an earlier daemon; owns the descriptor from then on.

        Raises:
            BadRequest: `BAD_POOL`, it is no pool of that size (a sealed memfd, an allocation of the GPU), or its
                memory was freed.

        """


class PoolStore(Protocol):
    """Keeps pools while no daemon runs, for workers that are not running either."""

    def take(self, worker: str, uid: int, spec: bytes, pid: int) -> int:
        """A descriptor of the pool that `worker` had under the last daemon, which the caller closes; else -1.

        The store has it until `keep` names what the worker has now. `pid` is the process that asks, 0 if unknown.

        Raises:
            Unavailable: `POOL_BUSY`, another process had it, and has not ended: it may write to it.

        """

    def lent(self, worker: str, uid: int, pid: int) -> None:
        """The worker's pool goes to this process, whose end the next daemon waits for; 0 if that cannot be seen."""

    def keep(self, worker: str, uid: int, spec: bytes, descriptor: int) -> None:
        """Keeps a duplicate of the descriptor of the worker's pool, in place of what it had under the last daemon."""

    def drop(self, worker: str) -> None:
        """The worker's pool has ended, or what `take` gave is no pool: keeps it no longer."""

    def give_up(self, uid: int) -> None:
        """Keeps the pools no longer that workers of this user had under the last daemon and have not claimed."""


class NoStore:
    """Keeps nothing: workers bring their pools back or get new ones."""

    def take(self, worker: str, uid: int, spec: bytes, pid: int) -> int:  # noqa: ARG002
        """There is none."""
        return -1

    def lent(self, worker: str, uid: int, pid: int) -> None:
        """Keeps nothing."""

    def keep(self, worker: str, uid: int, spec: bytes, descriptor: int) -> None:
        """Keeps nothing."""

    def drop(self, worker: str) -> None:
        """Has nothing."""

    def give_up(self, uid: int) -> None:
        """Has nothing."""
