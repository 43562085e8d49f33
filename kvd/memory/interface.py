"""What the daemon asks of memory: pools that it owns and can lend to another process."""

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
    def backing(self) -> str:
        """What it is made of: `hugetlb`, `thp` or `plain`."""

    @property
    def descriptor(self) -> int:
        """The file descriptor that a worker maps; stays this object's."""

    def move(self) -> None:
        """Maps the pool, whose bytes stay, at another address of this process; where it was, zeros are read.

        Raises:
            Unavailable: `OVERLOADED`, it cannot be mapped a second time; it stays where it is.

        """

    def close(self) -> None:
        """Unmaps and closes. The bytes live on while another process has them mapped."""

    def free(self) -> None:
        """Like `close`, and gives the memory back to the system whoever still has it mapped.

        Whoever has finds zeros there, and pays for what it writes. Takes long: it is done beside the loop.
        """


class MemoryProvider(Protocol):
    """Makes pools."""

    def footprint(self, size: int) -> int:
        """Bytes of memory that a pool of `size` bytes takes: whole pages."""

    def allocate(self, name: str, size: int) -> Memory:
        """A new pool of `size` bytes, zeroed and faulted in.

        Raises:
            Unavailable: `OVERLOADED`, there is not that much memory.

        """

    def adopt(self, descriptor: int, size: int) -> Memory:
        """The pool behind `descriptor`, which a worker kept from a daemon before this one; takes the descriptor over.

        Raises:
            BadRequest: `BAD_POOL`, it is no sealed memfd of that size (a worker could truncate it under us), or the
                memory of its pool has been given back.

        """

    def discard(self, descriptor: int) -> None:
        """Closes a descriptor that a worker sent along and nobody needs."""


class PoolStore(Protocol):
    """Keeps pools while no daemon runs, so that a worker that is gone too loses no bytes."""

    def take(self, worker: str, uid: int, spec: bytes) -> int:
        """The descriptor of the pool that `worker` had under the last daemon, for the caller to close; else -1."""

    def keep(self, worker: str, uid: int, spec: bytes, descriptor: int) -> None:
        """Keeps a duplicate of a pool's descriptor; a second time changes nothing."""

    def drop(self, worker: str) -> None:
        """The worker's pool has ended: its bytes need not be kept."""


class NoStore:
    """Where nothing outlives the daemon: workers bring their pools back, or get new ones."""

    def take(self, worker: str, uid: int, spec: bytes) -> int:  # noqa: ARG002
        """There is none."""
        return -1

    def keep(self, worker: str, uid: int, spec: bytes, descriptor: int) -> None:
        """Keeps nothing."""

    def drop(self, worker: str) -> None:
        """Has nothing."""
