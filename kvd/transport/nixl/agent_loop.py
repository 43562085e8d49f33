"""What the process of the NIXL transport does: commands, registrations, and the loop that posts and polls."""

from __future__ import annotations

import itertools
import os
import resource
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from msgspec import Struct

from kvd import limits
from kvd.memory.mapping import Mapping
from kvd.transport.interface import (
    Answered,
    Deregistered,
    Described,
    Notified,
    ReadRequest,
    Registered,
    RegisterFailed,
)
from kvd.transport.nixl.messages import Metadata, Reported, encode
from kvd.transport.nixl.poll_interval import PROMPT, RECENT, PollInterval
from kvd.transport.nixl.reads import Reads
from kvd.transport.nixl.ucx import UcxEndpoints, text_of

Command = Callable[[], None]

CHECKS_PER_POST = 32
"""Slices checked between two posts: thousands of small ones may be posted, and a check costs 1 us."""


CROWDED = 0.75
"""The part of its descriptors that this process may use before it says so."""

MAX_BLANKED = 1 << 15
MAX_BLANKED_BYTES = 1 << 45
"""Addresses of pools that have ended before it says so, ranges and bytes, which it cannot give back: half of the 65,530
mappings of `vm.max_map_count`, and a quarter of what a process can address."""


class _Pool(Struct, frozen=True):
    """A registered pool; `base` is its address in the daemon, `mapping` where it lies in this process.

    No metadata tells of one that is `hidden`.
    """

    base: int
    size: int
    mapping: Mapping
    registration: Any
    hidden: bool


class AgentLoop:
    """Runs one NIXL agent.

    `commands` waits so many seconds for commands, and returns those that came, or None if none will come any more.
    `emit` takes each event; `flush` delivers those emitted so far.
    """

    def __init__(
        self,
        agent: Any,
        failures: tuple[type[Exception], ...],
        endpoints: UcxEndpoints,
        *,
        commands: Callable[[float], Sequence[Command] | None],
        emit: Callable[[Reported], None],
        flush: Callable[[], None],
    ) -> None:
        self._commands = commands
        self._nixl = agent
        self._no_memory: bytes = agent.get_agent_metadata()
        """What NIXL says while nothing is registered: how to connect. It describes no empty list."""
        self._failures = failures
        self._emit = emit
        self._flush = flush
        self._addresses: dict[int, int] = {}
        """Where the pools lie in this process, by their address in the daemon."""
        self._reads = Reads(agent, failures, endpoints, self._addresses, emit=emit, flush=flush)
        self._poll = PollInterval()
        self._pools: dict[int, _Pool] = {}
        self._blanked = 0
        self._blanked_bytes = 0
        self._process = os.urandom(8)
        self._stop_seconds: float | None = None

    def run(self) -> None:
        """Serves until `stop`, or until no command will come; what escapes it is a defect."""
        busy = False
        polled = flushed = 0.0
        while self._stop_seconds is None:
            wait = 0.0 if busy else self._poll.seconds(time.monotonic(), bool(self._reads.in_flight))
            commands = self._commands(wait)
            if commands is None:
                return
            for command in commands:
                command()
            posted = self._reads.post_next()
            ended = self._reads.check_posted(CHECKS_PER_POST if posted else self._reads.in_flight)
            now = time.monotonic()
            if not posted or now - flushed >= RECENT:  # posts may follow one another for minutes
                self._flush()
                flushed = now
            if not posted or now - polled >= (PROMPT if self._poll.readers_expected else RECENT):
                self._take_messages(self._nixl.get_new_notifs())  # makes progress for peers that read from us, too
                polled = now
            busy = bool(commands) or posted or ended
            if ended or self._reads.in_flight:
                self._poll.touch(now)
        self._reads.close(self._stop_seconds)

    def _take_messages(self, messages: dict[Any, list[bytes]]) -> None:
        """Passes on what is not too long, and not too much at once: anybody can send it, under any name."""
        pairs = ((agent, content) for agent, contents in messages.items() for content in contents)
        for agent, content in itertools.islice(pairs, limits.MAX_NOTIFICATIONS_AT_ONCE):
            if len(content) <= limits.MAX_NOTIFICATION_BYTES and len(agent) <= limits.MAX_AGENT_BYTES:
                name = agent.decode(errors="replace") if isinstance(agent, bytes) else agent
                self._emit(Notified(name, content))
        if messages:
            self._flush()  # those of the next look would not fit the same frame

    # --- commands, as those of `Transport` --------------------------------------------------------------------------

    def register(self, pool: int, base: int, size: int, mapping: Mapping, hidden: bool) -> None:
        """Registers memory that the daemon has at `base`."""
        try:
            row = np.array([(mapping.base, size, 0)], dtype=np.uint64)
            registration = self._nixl.register_memory(row, mem_type="DRAM")
        except self._failures as error:
            mapping.close()
            self._emit(RegisterFailed(pool, f"{text_of(error)} for {size} bytes"))
        else:
            self._pools[pool] = _Pool(base, size, mapping, registration, hidden)
            self._addresses[base] = mapping.base
            self._emit(Registered(pool, self.metadata))

    def deregister(self, pool: int) -> None:
        """Ends a registration. Its address reads as zeros from then on: some fabrics check no keys."""
        ended = self._pools.pop(pool)
        self._nixl.deregister_memory(ended.registration)
        del self._addresses[ended.base]
        self._blanked += 1
        self._blanked_bytes += ended.mapping.length
        ended.mapping.blank()
        self._emit(Deregistered(pool, self.metadata))

    @property
    def metadata(self) -> bytes:
        """What peers need to reach everything that is registered now, and not hidden."""
        return self._covering([pool for pool in self._pools.values() if not pool.hidden])

    def describe(self, pools: tuple[int, ...]) -> None:
        """Makes metadata that covers `pools` only."""
        self._emit(Described(pools, self._covering([self._pools[pool] for pool in pools if pool in self._pools])))

    def _covering(self, pools: list[_Pool]) -> bytes:
        addresses = {pool.base: pool.mapping.base for pool in pools}
        return encode(Metadata(self._of_nixl(pools), self._process, addresses))

    def _of_nixl(self, pools: list[_Pool]) -> bytes:
        if not pools:
            return self._no_memory
        rows = np.array([(pool.mapping.base, pool.size, 0) for pool in pools], dtype=np.uint64)
        described = self._nixl.get_reg_descs(rows, mem_type="DRAM")
        partial: bytes = self._nixl.get_partial_agent_metadata(described, True, ["UCX"])
        return partial

    def add_peer(self, agent: str, metadata: bytes) -> None:
        """Adds a peer."""
        self.expect_connection()
        self._reads.peers.add(agent, metadata)

    def remove_peer(self, agent: str) -> None:
        """Forgets a peer once its reads have ended."""
        self._reads.peers.remove(agent)

    def read(self, request: ReadRequest) -> None:
        """Starts a read."""
        self._reads.begin(request)

    def abort(self, read: int) -> None:
        """Ends a read early if it can."""
        self._reads.abort(read)

    def notify(self, agent: str, content: bytes) -> None:
        """Sends a message to a peer, if it can."""
        self._reads.peers.notify(agent, content)

    def expect_connection(self) -> None:
        """Polls more often for a while."""
        self._poll.touch(time.monotonic())

    def expect_readers(self, expected: bool) -> None:
        """Polls as often as peers that read need it."""
        self._poll.readers_expected = expected

    def ping(self, number: int) -> None:
        """Gives a sign of life."""
        few_addresses = self._blanked >= MAX_BLANKED or self._blanked_bytes >= MAX_BLANKED_BYTES
        self._emit(Answered(number, _is_crowded(), few_addresses))

    def stop(self, seconds: float) -> None:
        """Makes `run` return: no new posts, and `seconds` for those in flight."""
        self._stop_seconds = seconds


def _is_crowded() -> bool:
    """Whether most descriptors are in use: a new one has the lowest free number."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        lowest = os.dup(0)
    except OSError:
        return True
    os.close(lowest)
    return most != resource.RLIM_INFINITY and lowest >= CROWDED * most
