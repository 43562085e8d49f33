"""What runs on the NIXL transport's thread: commands, registrations, and the loop that posts and polls."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from kvd.transport.interface import (
    Answered,
    Deregistered,
    Described,
    Event,
    ReadRequest,
    Registered,
    RegisterFailed,
)
from kvd.transport.nixl.peers import text_of
from kvd.transport.nixl.poll_interval import PROMPT, RECENT, PollInterval
from kvd.transport.nixl.reads import Reads
from kvd.transport.nixl.ucx_endpoints import UcxEndpoints

Command = Callable[[], None]

CHECKS_PER_POST = 32
"""Slices checked between two posts: thousands of small ones may be posted, and a check costs 1 us."""

_abandoned: list[object] = []
"""Agents stopped with slices posted: to destroy one would free what UCX still uses."""


class AgentThread:
    """Runs one NIXL agent. Every method but `commands.put` belongs to the thread in `run`.

    `emit` takes each event; `flush` delivers those emitted so far.
    """

    def __init__(
        self,
        agent: Any,
        failures: tuple[type[Exception], ...],
        endpoints: UcxEndpoints,
        *,
        emit: Callable[[Event], None],
        flush: Callable[[], None],
    ) -> None:
        self.commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._nixl = agent
        self._failures = failures
        self._emit = emit
        self._flush = flush
        self._reads = Reads(agent, failures, endpoints, emit=emit, flush=flush)
        self._poll = PollInterval()
        self._pools: dict[int, Any] = {}
        self._regions: dict[int, tuple[int, int, int]] = {}
        """(address, bytes, device), by pool."""
        self._stop_seconds: float | None = None

    def run(self) -> None:
        """Serves until `stop`; what escapes it is a defect."""
        busy = False
        polled = 0.0
        while self._stop_seconds is None:
            wait = 0.0 if busy else self._poll.seconds(time.monotonic(), bool(self._reads.in_flight))
            command = self._next_command(wait)
            self._run_commands(command)
            posted = self._reads.post_next()
            ended = self._reads.check_posted(CHECKS_PER_POST if posted else self._reads.in_flight)
            if not posted:
                self._flush()
            now = time.monotonic()
            if not posted or now - polled >= (PROMPT if self._poll.readers_expected else RECENT):
                self._nixl.get_new_notifs()  # makes progress for peers that read from us; none arrive
                polled = now
            busy = command is not None or posted or ended
            if ended or self._reads.in_flight:
                self._poll.touch(now)
        self._shut_down(self._stop_seconds)

    # --- commands, as those of `Transport` --------------------------------------------------------------------------

    def register(self, pool: int, base: int, size: int) -> None:
        """Registers memory."""
        region = (base, size, 0)
        try:
            self._pools[pool] = self._nixl.register_memory(np.array([region], dtype=np.uint64), mem_type="DRAM")
        except self._failures as error:
            self._emit(RegisterFailed(pool, f"{text_of(error)} for {size} bytes at {base:#x}"))
        else:
            self._regions[pool] = region
            self._emit(Registered(pool, self._nixl.get_agent_metadata()))

    def deregister(self, pool: int) -> None:
        """Ends a registration."""
        self._nixl.deregister_memory(self._pools.pop(pool))
        del self._regions[pool]
        self._emit(Deregistered(pool, self._nixl.get_agent_metadata()))

    def describe(self, pools: tuple[int, ...]) -> None:
        """Makes metadata that covers `pools` only."""
        regions = [self._regions[pool] for pool in pools if pool in self._regions]
        rows = np.array(regions, dtype=np.uint64).reshape(-1, 3)
        described = self._nixl.get_reg_descs(rows, mem_type="DRAM")
        self._emit(Described(pools, self._nixl.get_partial_agent_metadata(described, True, ["UCX"])))

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

    def expect_connection(self) -> None:
        """Polls more often for a while."""
        self._poll.touch(time.monotonic())

    def expect_readers(self, expected: bool) -> None:
        """Polls as often as peers that read need it."""
        self._poll.readers_expected = expected

    def ping(self, number: int) -> None:
        """Gives a sign of life."""
        self._emit(Answered(number))

    def stop(self, seconds: float) -> None:
        """Makes `run` return: no new posts, and `seconds` for those in flight."""
        self._stop_seconds = seconds

    # --- the loop ---------------------------------------------------------------------------------------------------

    def _next_command(self, seconds: float) -> Command | None:
        """Waits for a command; None if none came."""
        try:
            return self.commands.get(timeout=seconds) if seconds else self.commands.get_nowait()
        except queue.Empty:
            return None

    def _run_commands(self, command: Command | None) -> None:
        """Runs a command and those that came after it."""
        if command is None:
            return
        command()
        for _ in range(self.commands.qsize()):
            self.commands.get_nowait()()

    def _shut_down(self, seconds: float) -> None:
        if not self._reads.close(seconds):
            _abandoned.append(self._nixl)
            return
        for registration in self._pools.values():
            self._nixl.deregister_memory(registration)
        del self._nixl, self._reads
