"""Ends what requests have left: the prefill of a client that is gone, and an offer that perhaps nobody lets go of.

An engine that is told to abort a prefill in its last step ends it all the same, and holds the offered blocks until
their ttl, because the answer with the ticket reaches nobody. So a prefill gets a moment to end. Then a decode server is
sent the request and aborts it, which releases the offer. The same is done where a decode server has not begun its
answer: it may have ended the request before its engine had it. If it let go of the offer, that does no harm. For the
same reason a release gets a moment after the head of its answer, which vLLM sends before its engine has the request.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine, Sequence
from functools import partial
from http import HTTPStatus

from kvd.router import limits
from kvd.router.answer import Answer, ServerFailed, Whole
from kvd.router.attempts import Attempts
from kvd.router.body import Request, new_room
from kvd.router.engines import Prefilled
from kvd.router.metrics import Metrics
from kvd.router.servers import Server, Servers
from kvd.router.shares import Shares
from kvd.router.upstream import Sent, Upstream

logger = logging.getLogger(__name__)


class Cleanup:
    """Works in the background, on a bounded number of requests."""

    def __init__(self, decode: Servers, upstream: Upstream, metrics: Metrics) -> None:
        self._decode = decode
        self._upstream = upstream
        self._metrics = metrics
        self._tasks: set[asyncio.Task[None]] = set()
        self._prefills = Shares()
        """That are left to end."""
        self._releases = Shares()
        """Requests whose offers are released."""
        self._bytes = Shares()
        """Of the bodies of both, which no client has in flight any more."""

    def leave(self, request: Request, prefill: asyncio.Task[Prefilled | Whole], attempts: Attempts) -> None:
        """Lets `prefill`, which returns a server's answer, end for a moment; then its offer is left over.

        It is released (`release`) once the request is settled.
        """
        if prefill.done():
            answer = None if prefill.cancelled() or prefill.exception() else prefill.result()
            if isinstance(answer, Prefilled):
                attempts.left_over.append(answer)
        elif self._has_room(request, self._prefills, limits.LEFT_PREFILLS, limits.CLIENT_LEFT_PREFILLS):
            ended = self._start(request, self._prefills, self._left(prefill, attempts))
            ended.add_done_callback(partial(self._left_over, request, attempts))
        else:
            prefill.cancel()

    def release(self, request: Request, attempts: Attempts) -> None:
        """Releases the offers that are left over through a decode server; if that fails, through another one.

        Through the one that refused the request itself, and those that failed in `attempts`, only if no other does.
        """
        offers, attempts.left_over = attempts.left_over, []
        if not offers:
            return
        if self._has_room(request, self._releases, limits.REQUESTS, limits.CLIENT_REQUESTS):
            self._start(request, self._releases, self._released(request, offers, attempts))
        else:
            self._metrics.releases.labels("failed").inc(len(offers))

    async def close(self) -> None:
        """Waits for all that is being ended."""
        while self._tasks:  # what prefills leave is released when they have ended
            await asyncio.gather(*self._tasks)

    def _has_room(self, request: Request, counted: Shares, most: int, most_of_client: int) -> bool:
        client, size = request.client, request.body.size
        room = counted.total < most and counted.of(client) < most_of_client
        room = room and self._bytes.total + size <= limits.CLEANUP_BYTES
        if room and self._bytes.of(client) + size <= limits.CLIENT_CLEANUP_BYTES:
            return True
        text = (
            "an offer may stand until its ttl: of %d others (%d bytes) what they left is being ended, %d of them of %s"
        )
        logger.warning(text, counted.total, self._bytes.total, counted.of(client), client)
        return False

    def _start(self, request: Request, counted: Shares, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        counted.add(request.client, 1)
        self._bytes.add(request.client, request.body.size)
        task.add_done_callback(partial(self._ended, request, counted))
        return task

    def _ended(self, request: Request, counted: Shares, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        counted.add(request.client, -1)
        self._bytes.add(request.client, -request.body.size)

    def _left_over(self, request: Request, attempts: Attempts, _: asyncio.Task[None]) -> None:
        """A prefill that was left has ended, and takes no place of others any more while its offer is released."""
        if attempts.settled:
            self.release(request, attempts)

    async def _left(self, prefill: asyncio.Task[Prefilled | Whole], attempts: Attempts) -> None:
        try:
            async with asyncio.timeout(limits.LEAVE_SECONDS):
                answer = await prefill  # the deadline cancels it, which aborts it on its server
        except (TimeoutError, ServerFailed):
            return
        if isinstance(answer, Prefilled):
            attempts.left_over.append(answer)

    async def _released(self, request: Request, offers: Sequence[Prefilled], attempts: Attempts) -> None:
        for number, offer in enumerate(offers):
            if not await self._is_released(request, offer, attempts):
                # The same servers would fail at the others, and take as long for each.
                self._metrics.releases.labels("failed").inc(len(offers) - number)
                return
            self._metrics.releases.labels("done").inc()

    async def _is_released(self, request: Request, offer: Prefilled, attempts: Attempts) -> bool:
        asked: list[Server] = []
        while server := self._next(attempts, asked):
            asked.append(server)
            attempts.asked_first = server
            if await self._is_released_by(server, request, offer):
                return True
            attempts.tried.add(server)
        names = ", ".join(server.url for server in asked)
        logger.warning("an offer ends by its ttl: none of these decode servers releases it: %s", names)
        return False

    def _next(self, attempts: Attempts, asked: Sequence[Server]) -> Server | None:
        """The likeliest to release an offer of the decode servers that were not asked yet.

        All releases of a request ask one server after the other, and no more than may fail at the request itself: it
        may be at fault. Those that failed come last.
        """
        now = time.monotonic()

        def doubts(server: Server) -> tuple[bool, bool, bool, int, int]:
            elsewhere = server is not attempts.asked_first
            return elsewhere, server is attempts.refused_by, server.rests_until > now, server.in_flight, server.turn

        failed = [server for server in self._decode.all if server in attempts.tried]
        others = [server for server in self._decode.all if server not in attempts.tried]
        left = [server for server in failed if server not in asked]
        if len(failed) < limits.ATTEMPTS and others:
            left = others
        return min(left, key=doubts, default=None)

    async def _is_released_by(self, server: Server, request: Request, offer: Prefilled) -> bool:
        body = request.body.for_release(offer, server.engine, new_room())
        try:
            async with (
                asyncio.timeout(limits.RELEASE_SECONDS) as deadline,
                self._upstream.post(server, request.path, body, request.headers, Sent()) as answer,
            ):
                deadline.reschedule(None)
                if answer.status == HTTPStatus.OK:
                    await _taken(answer)
                    return True
                logger.warning("%s does not release an offer: it answered with status %d", server.name, answer.status)
        except TimeoutError:
            text = "%s does not release an offer: it did not answer within %g s"
            logger.warning(text, server.name, limits.RELEASE_SECONDS)
        except ServerFailed as error:
            logger.warning("an offer is not released there: %s", error)
        return False


async def _taken(answer: Answer) -> None:
    """Waits until the engine has the request: for its first event, or, if it queues or loads, for a moment.

    Raises:
        ServerFailed: The answer ends without one, says an error, or is broken off. Such an engine need not have had the
            request, and is perhaps dead.

    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limits.TAKEN_SECONDS):
            await answer.beginning()
