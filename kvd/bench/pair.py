"""What every measurement runs on: two daemons, the producer's process, and this process as the consumer."""

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvd.bench.producer import Attach, Attached, Closed, CloseRaw, Offer, Offered, OpenRaw, RawOpened, Reply, Request
from kvd.bench.raw import RawAgent
from kvd.bench.spec import flat_spec, pattern
from kvd.client import Blocks, Done, Worker
from kvd.errors import ErrorCode, refusal
from kvd.layout import CacheSpec
from kvd.plan import Descriptors, Planner, SpanPair, route
from kvd.processes import START_SECONDS, Child, Processes
from kvd.transport.nixl.poll_interval import PROMPT, RECENT

R = TypeVar("R", Attached, Offered, RawOpened, Closed)

_PULL_SECONDS = 120.0
_PORT = 7710


class Pool:
    """The same pool on both sides, laid out by `flat_spec`; the producer's is filled with a pattern.

    `bytes` are this side's, uint8 [layers * blocks, block_bytes]: see `rows`.
    """

    def __init__(
        self, pair: "Pair", name: str, blocks: int, block_bytes: int, layers: int, *, cross_layer: bool
    ) -> None:
        self.name, self.blocks, self.block_bytes = name, blocks, block_bytes
        self._pair, self._layers, self._cross_layer = pair, layers, cross_layer
        spec = flat_spec(blocks, block_bytes, layers, cross_layer=cross_layer)
        self.worker = pair.attach("consumer", name, spec)
        self.bytes: NDArray[np.uint8] = np.frombuffer(self.worker.pool, dtype=np.uint8).reshape(-1, block_bytes)
        attach = Attach(str(pair.sockets["producer"]), name, blocks, block_bytes, layers, cross_layer)
        attached = pair.ask(attach, Attached)
        self.backing = (attached.backing, self.worker.backing)
        self._planner = Planner(spec, spec, route([spec], spec).shares[0])
        self._raw: tuple[RawAgent, str, int] | None = None
        self._pulls = 0
        self._open: set[str] = set()

    def descriptors(self, source: Sequence[int], destination: Sequence[int]) -> Descriptors:
        """The descriptors that kvd plans for these blocks."""
        there, here = (np.asarray(side, dtype=np.uint32) for side in (source, destination))
        return self._planner.plan([SpanPair(0, there, 0, here)])

    def rows(self, ids: Sequence[int]) -> list[int]:
        """The rows of `bytes` that these blocks occupy, in the layout's order."""
        if self._cross_layer:
            return [block * self._layers + layer for block in ids for layer in range(self._layers)]
        return [layer * self.blocks + block for layer in range(self._layers) for block in ids]

    def tickets(self, ids: Sequence[int], times: int) -> list[str]:
        """Offers the producer's blocks `times` times."""
        return self._pair.ask(Offer(self.name, list(ids), times), Offered).tickets

    def start_pull(self, ticket: str, destination: Sequence[int]) -> str:
        """Sends a pull and returns its name."""
        self._pulls += 1
        request = f"pull-{self._pulls}"
        self._open.add(request)
        self.worker.pull(request, ticket, blocks=[Blocks(group=0, first=0, ids=destination)], timeout=_PULL_SECONDS)
        return request

    def collect(self, timeout: float) -> list[str]:
        """Waits for outcomes at most `timeout` seconds; returns the names of the pulls that are done.

        Raises:
            InternalError: a pull failed.

        """
        done = []
        for event in self.worker.wait(timeout):
            if not isinstance(event, Done):
                raise refusal(ErrorCode.INTERNAL, f"a pull of the benchmark ended as {event}")
            self._open.discard(event.request)
            done.append(event.request)
        return done

    def is_open(self, request: str) -> bool:
        """Whether `collect` has not seen the pull's outcome yet."""
        return request in self._open

    def pull(self, ticket: str, destination: Sequence[int]) -> float:
        """Seconds from sending a pull to its `Done`."""
        started = time.perf_counter()
        request = self.start_pull(ticket, destination)
        while self.is_open(request):
            self.collect(_PULL_SECONDS)
        return time.perf_counter() - started

    def raw(self, descriptors: Descriptors) -> float:
        """Seconds that raw NIXL takes to read the same."""
        if self._raw is None:
            agent = RawAgent(f"raw-consumer-{self.name}", self.bytes.ctypes.data, self.bytes.nbytes)
            opened = self._pair.ask(OpenRaw(self.name, PROMPT if self._pair.remote else RECENT), RawOpened)
            self._raw = agent, agent.connect(opened.metadata), opened.base
            agent.read(*self._raw[1:], descriptors)  # connects
        agent, peer, base = self._raw
        started = time.perf_counter()
        agent.read(peer, base, descriptors)
        return time.perf_counter() - started

    def check(self, source: Sequence[int], destination: Sequence[int]) -> None:
        """Compares every byte of the blocks.

        Raises:
            InternalError: one differs.

        """
        expected = pattern(len(self.bytes), self.block_bytes)[self.rows(source)]
        if not np.array_equal(self.bytes[self.rows(destination)], expected):
            raise refusal(ErrorCode.INTERNAL, f"wrong bytes in {self.name} after a pull that was done")


@dataclass(frozen=True, slots=True)
class Place:
    """A host for one side: the command prefix that runs a command there, and its address."""

    within: tuple[str, ...]
    address: str


class Pair:
    """Starts everything under `folder`, and ends it with the `with` block.

    With `places`, each side is on a host of its own; this process must be on the consumer's. `daemons_within` is a
    command prefix that places the daemons, such as `taskset`.
    """

    def __init__(
        self, folder: Path, places: Mapping[str, Place] | None = None, *, daemons_within: Sequence[str] = ()
    ) -> None:
        self._places = places or {}
        self._daemons_within = tuple(daemons_within)
        self.sockets = {side: folder / f"{side}.sock" for side in ("producer", "consumer")}
        self._processes = Processes(folder)
        self._decoder: msgspec.json.Decoder[Reply] = msgspec.json.Decoder(Reply)
        self._pools: list[Pool] = []

    def __enter__(self) -> "Pair":
        with ExitStack() as stack:
            stack.enter_context(self._processes)
            self.daemons = {side: self._start_daemon(side) for side in self.sockets}
            self._producer: Child = self._processes.start(
                "producer-worker", "kvd.bench.producer", piped=True, within=self._within("producer")
            )
            self._input = open(self._producer.source, "rb", closefd=False)
            stack.pop_all()  # all of them run: what ends them is the end of this block
        return self

    def __exit__(self, *_: object) -> None:
        for pool in self._pools:
            pool.worker.close()
        self._processes.__exit__(None, None, None)

    def _start_daemon(self, side: str) -> Child:
        flags: list[str] = []
        if side in self._places:
            address = self._places[side].address
            flags = ["--listen", f"tcp://{address}:{_PORT}", "--insecure", "--unprotected-transport", address]
        within = [*self._within(side), *self._daemons_within]
        return self._processes.start_daemon(f"bench-{side}", self.sockets[side], *flags, within=within)

    def attach(self, side: str, name: str, spec: CacheSpec) -> Worker:
        """A worker of this process at the daemon of `side`.

        Raises:
            KvdError: as `Worker.attach`.
            ProcessEndedError: the daemon has ended.

        """
        socket = self.sockets[side]
        self.daemons[side].wait_until(socket.exists)
        return Worker.attach(str(socket), name=name, spec=spec, timeout=START_SECONDS)

    @property
    def remote(self) -> bool:
        """Whether each side is on a host of its own."""
        return bool(self._places)

    def _within(self, side: str) -> Sequence[str]:
        return self._places[side].within if side in self._places else ()

    def pool(self, name: str, blocks: int, block_bytes: int, layers: int = 1, *, cross_layer: bool = False) -> Pool:
        """A new pool on both sides."""
        pool = Pool(self, name, blocks, block_bytes, layers, cross_layer=cross_layer)
        self._pools.append(pool)
        return pool

    def ask(self, request: Request, kind: type[R]) -> R:
        """Sends a request to the producer's process and returns its reply."""
        self._producer.write(msgspec.json.encode(request) + b"\n")
        line = self._input.readline()
        if not line:
            raise self._producer.ended()
        reply = self._decoder.decode(line)
        if not isinstance(reply, kind):
            raise refusal(ErrorCode.INTERNAL, f"the producer answered {reply} to {request}")
        return reply

    def quiet_raw(self) -> None:
        """Stops the raw agents' threads in the producer's process."""
        self.ask(CloseRaw(), Closed)
