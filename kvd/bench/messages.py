"""Messages between the measuring process and the producer's process: JSON, one per line."""

import msgspec


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of the messages; the class name is the tag."""


class Attach(Message, frozen=True):
    """Attach to the daemon at `socket` as `worker`, with a pool laid out by `flat_spec`, and fill it."""

    socket: str
    worker: str
    blocks: int
    block_bytes: int
    layers: int
    cross_layer: bool


class Offer(Message, frozen=True):
    """Offer these blocks `times` times."""

    worker: str
    ids: list[int]
    times: int


class OpenRaw(Message, frozen=True):
    """Open a NIXL agent over the pool and keep it going until `CloseRaw`.

    It looks at the network every `pause` seconds, because over TCP the side that is read has to send.
    """

    worker: str
    pause: float


class CloseRaw(Message, frozen=True):
    """Stop the agents, which would take time from the next measurement."""


class Attached(Message, frozen=True):
    """The pool is attached and filled."""

    backing: str


class Offered(Message, frozen=True):
    """The tickets of the offers."""

    tickets: list[str]


class RawOpened(Message, frozen=True):
    """The agent's metadata (base64 in JSON), and the pool's address in this process."""

    metadata: bytes
    base: int


class Closed(Message, frozen=True):
    """The agents have stopped."""


Request = Attach | Offer | OpenRaw | CloseRaw
Reply = Attached | Offered | RawOpened | Closed
