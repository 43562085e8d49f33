"""What an attack is: a class with a name, which sends what its dice say at a daemon and knows nothing of others."""

from collections.abc import Iterator
from random import Random
from typing import ClassVar

from msgspec import Struct

REGISTRY: dict[str, type["Attack"]] = {}
"""Every attack by its name."""

BATCH = 32
"""Messages between two moments at which other attacks get their turn."""


class Place(Struct, frozen=True):
    """Where a daemon is attacked."""

    pid: int
    socket: str
    address: str
    """Of its peers' socket, with `#key` where it has one."""
    http: str
    ports: tuple[str, ...]
    """TCP addresses, `host:port`, that it listens on besides these: its transport's."""
    near: str
    """Address of an honest neighbour daemon."""
    router: str
    """A router's `host:port`, whose servers never answer."""
    key: str
    """Key file of an admitted daemon called `evil`; empty where nobody has keys."""

    @property
    def requests(self) -> str:
        """Where workers send requests."""
        return f"{self.socket}.zmq"


class Attack:
    """`strike` yields how many messages it has just sent; it is begun again when it ends or is broken off."""

    name: ClassVar[str]
    who: ClassVar[str]
    """`stranger` (another user where the run may become one), `worker`, `peer`, `client` (of the router), or `crowd`:
    many users, which only root can play."""
    cost: ClassVar[float] = 1.0
    """What one message takes, in small messages: a run of n messages has fewer of the dear ones."""

    def __init_subclass__(cls) -> None:
        if "name" in vars(cls):
            assert cls.name not in REGISTRY
            REGISTRY[cls.name] = cls

    def __init__(self, place: Place, dice: Random) -> None:
        self.place, self.dice = place, dice

    def strike(self) -> Iterator[int]:
        """One round; everything that it opened is closed when it is left."""
        raise NotImplementedError
