"""A service manager which keeps descriptors while a daemon restarts, as systemd's store does for its units."""

from collections.abc import Callable

from tests.simulator.checks.promises import Promise
from tests.simulator.virtual.memory import File
from tests.simulator.virtual.world import World


class Systemd:
    """The store of one daemon; implements `kvd.daemon.systemd.Keeper`."""

    def __init__(self, world: World, daemon: str) -> None:
        self.in_use: Callable[[File], bool] = lambda _file: False
        """Whether a worker has that pool from the daemon, or is owed it."""
        self._world = world
        self._daemon = daemon
        self._owner = f"systemd/{daemon}"
        self._kept: dict[str, list[int]] = {}

    @property
    def files(self) -> list[File]:
        """The pools that are stored."""
        return [file for file in self._stored if not file.pid]

    @property
    def _stored(self) -> list[File]:
        return [self._world.kernel.file(each) for kept in self._kept.values() for each in kept]

    def store(self, name: str, descriptor: int) -> None:
        """Keeps a duplicate, unless that file is stored already."""
        file = self._world.kernel.file(descriptor)
        if file not in self._stored:
            self._kept.setdefault(name, []).append(self._world.kernel.open(self._owner, file))

    def unstore(self, name: str) -> None:
        """Closes all of that name."""
        for descriptor in self._kept.pop(name, []):
            file = self._world.kernel.file(descriptor)
            self._world.kernel.close(descriptor)
            if self.in_use(file):
                text = f"{self._daemon} has the pool in file {file.number} stored no longer, which is in use"
                self._world.violate(Promise.SURVIVES, text)

    def hand_over(self, process: str) -> dict[str, int]:
        """The descriptors that a new process gets, by name: of several under one name it can use only the first."""
        kernel = self._world.kernel
        return {name: kernel.open(process, kernel.file(kept[0])) for name, kept in self._kept.items()}
