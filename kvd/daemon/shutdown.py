"""The end of a daemon: it refuses new work, lets running work finish, tells workers and peers, then stops the parts."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvd.actors.build import Actors
from kvd.actors.completion.actor import CompletionActor
from kvd.actors.leases.actor import LeasesActor
from kvd.actors.runtime.actor import call
from kvd.actors.scheduler.actor import SchedulerActor
from kvd.net.interface import PeerPort, WorkerPort

_Worked = LeasesActor | SchedulerActor | CompletionActor

STOP_SECONDS = 15.0
"""For the parts to stop, after the grace time; then the process ends without them."""
_FLUSH_TURNS = 10_000
"""Of the loop, for the last messages to pass through the actors. Not seconds: a process that is stopped meanwhile would
have none left."""
_ACKNOWLEDGE_SECONDS = 0.5
"""For workers to acknowledge the last notifications, as an engine does with its next step. By then they are in the
socket of one that does not, and the end of its session cannot overtake them."""


class Part(NamedTuple):
    """What takes a while to stop; `name` is for people."""

    name: str
    stop: Callable[[], Awaitable[object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a daemon consists of beside its actors."""

    peers: PeerPort
    workers: WorkerPort
    transport: Sequence[Part]
    """What writes to pools, in the order in which it is stopped."""
    rest: Sequence[Part] = ()
    """What is stopped last."""


class Shutdown:
    """Runs once. `failed` says whether the daemon's state may be wrong: then running work is not waited for."""

    def __init__(self, failed: Callable[[], bool]) -> None:
        self._failed = failed
        self._hurry = asyncio.Event()
        self._idle = asyncio.Event()
        self._busy: set[str] = set()
        self._part = "an actor"
        """What is being stopped."""

    def hurry(self) -> None:
        """Does not wait for running work any more."""
        self._hurry.set()

    def is_idle(self, actor: str) -> None:
        """An actor that was told to drain has nothing left to do."""
        self._busy.discard(actor)
        if not self._busy:
            self._idle.set()

    async def run(self, actors: Actors, parts: Parts, grace: float) -> str:
        """Gives running work `grace` seconds. Returns the name of a part that did not stop in time, else nothing.

        Workers keep their sessions, and the socket its lock, until the transport has ended: only then does this process
        no longer write to their pools. If a part does not stop (a driver that never returns from a copy), the end of
        the process ends it, and tells the workers.
        """
        call(actors.gateway.drain)
        if not self._failed():
            await self._drain(actors.leases, actors.scheduler, seconds=grace)
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await self._stop(actors, parts)
        except TimeoutError:
            return self._part
        return ""

    async def _stop(self, actors: Actors, parts: Parts) -> None:
        """Stops one after the other; `_part` says which."""
        call(actors.scheduler.stop)
        call(actors.leases.stop)
        await self._flush(actors)
        failed = self._failed()
        if failed:
            parts.peers.close()  # what it would answer them may be wrong
        # Workers hear why their pulls have failed, though: the end of their sessions could overtake that.
        await self._drain(actors.completion, seconds=_ACKNOWLEDGE_SECONDS)
        if not failed:
            parts.peers.close()
        await self._stop_each(parts.transport)
        await self._flush(actors)  # workers hear what the transport has said last, too
        self._part = "the workers' socket"
        call(actors.gateway.connections.close_all)
        await self._flush(actors)
        parts.workers.close()
        await self._stop_each(parts.rest)

    async def _stop_each(self, parts: Sequence[Part]) -> None:
        for part in parts:
            self._part = part.name
            await part.stop()

    async def _drain(self, *workers: _Worked, seconds: float) -> None:
        """Waits until these actors have no work left, `seconds` have passed, or somebody is in a hurry."""
        self._busy = {actor.name for actor in workers}
        self._idle.clear()
        for actor in workers:
            call(actor.drain)
        waiting = {asyncio.ensure_future(self._idle.wait()), asyncio.ensure_future(self._hurry.wait())}
        await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for future in waiting:
            future.cancel()

    async def _flush(self, actors: Actors) -> None:
        """Lets the calls in the mailboxes be made."""
        for _ in range(_FLUSH_TURNS):
            if not any(actor.waiting for actor in actors.all):
                return
            await asyncio.sleep(0)
