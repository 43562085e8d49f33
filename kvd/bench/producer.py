"""The producer's process: fills pools, offers blocks and serves raw NIXL, as requests on standard input say.

Requests and replies are JSON, one a line.
"""

import os
import sys

import msgspec
import numpy as np

from kvd.bench.raw import RawAgent
from kvd.bench.spec import flat_spec, pattern, tokens_of
from kvd.client import Blocks, Worker

OFFER_SECONDS = 600.0


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


class Producer:
    """Workers by name, and the raw agents over their pools."""

    def __init__(self) -> None:
        self._workers: dict[str, Worker] = {}
        self._raw: list[RawAgent] = []
        self._offers = 0

    def handle(self, request: Request) -> Reply:
        """Does what the request says and returns the reply."""
        match request:
            case Attach():
                return self._attach(request)
            case Offer():
                return self._offer(request)
            case OpenRaw():
                return self._open_raw(request)
            case _:
                for agent in self._raw:
                    agent.stop_serving()
                return Closed()

    def _attach(self, request: Attach) -> Attached:
        spec = flat_spec(request.blocks, request.block_bytes, request.layers, cross_layer=request.cross_layer)
        worker = Worker.attach(request.socket, name=request.worker, spec=spec, timeout=60)
        pool = np.frombuffer(worker.pool, dtype=np.uint8)
        pool[:] = pattern(request.layers * request.blocks, request.block_bytes).reshape(-1)
        self._workers[request.worker] = worker
        return Attached(worker.backing)

    def _offer(self, request: Offer) -> Offered:
        worker = self._workers[request.worker]
        worker.poll()  # acknowledges released offers
        blocks = [Blocks(group=0, first=0, ids=request.ids)]
        tickets = []
        for _ in range(request.times):
            self._offers += 1
            name = f"offer-{self._offers}"
            tickets.append(worker.offer(name, tokens=tokens_of(len(request.ids)), blocks=blocks, ttl=OFFER_SECONDS))
        return Offered(tickets)

    def _open_raw(self, request: OpenRaw) -> RawOpened:
        pool = np.frombuffer(self._workers[request.worker].pool, dtype=np.uint8)
        agent = RawAgent(f"raw-producer-{request.worker}", pool.ctypes.data, pool.nbytes)
        agent.serve(request.pause)
        self._raw.append(agent)
        return RawOpened(agent.metadata, agent.base)


def main() -> None:
    """Serves requests until the input ends; exits without NIXL's teardown."""
    producer = Producer()
    decoder: msgspec.json.Decoder[Request] = msgspec.json.Decoder(Request)
    for line in sys.stdin.buffer:
        sys.stdout.buffer.write(msgspec.json.encode(producer.handle(decoder.decode(line))) + b"\n")
        sys.stdout.buffer.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
