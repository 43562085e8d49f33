"""One request's life: prefilled on one server, decoded on another, and tried again elsewhere until its first token.

Where the prefill server takes that, both get the request at once (`kvd.router.growing`). If that comes to nothing, the
request goes its way one after the other: the decode server is then asked with what the prefill has answered.
"""

import asyncio
import logging
import time
from functools import partial
from http import HTTPStatus

import msgspec

from kvd.errors import ErrorCode, KvdError, Unavailable, refusal
from kvd.router import limits
from kvd.router.affinity import Affinity, Pair
from kvd.router.answer import Answer, ServerFailed, Whole
from kvd.router.attempts import Attempts
from kvd.router.body import Request, new_room
from kvd.router.cleanup import Cleanup
from kvd.router.conversations import Conversations
from kvd.router.engines import Engine, Prefilled, prefilled_of
from kvd.router.events import Errors
from kvd.router.growing import Producers
from kvd.router.legs import Meeting
from kvd.router.metrics import Metrics
from kvd.router.reply import ClientGone, Reply
from kvd.router.servers import Server, Servers, ask
from kvd.router.upstream import Sent, Upstream

logger = logging.getLogger(__name__)


class BrokenOff(Unavailable):
    """A decode server failed after part of its answer was passed on."""


class Router:
    """Between the servers `prefill` and `decode`. `turns`: what is decoded is kept for the next turn's prefill."""

    def __init__(self, prefill: Servers, decode: Servers, upstream: Upstream, metrics: Metrics, *, turns: bool) -> None:
        self._prefill = prefill
        self._decode = decode
        self._upstream = upstream
        self._metrics = metrics
        self._affinity = Affinity()
        self._producers = Producers()
        self._cleanup = Cleanup(decode, upstream, metrics)
        self._conversations = Conversations(upstream, metrics, keeps=turns)

    async def answer(self, request: Request, client: Reply) -> None:
        """Answers `client`. Being cancelled ends the request on both servers (`kvd.router.cleanup`).

        Raises:
            Unavailable: Servers failed, and nothing was sent to the client.
            BrokenOff: One failed afterwards.

        """
        self._check(request)
        attempts = Attempts(turn=await self._conversations.take(request))
        try:
            while True:
                try:
                    await self._attempt(request, client, attempts)
                except ServerFailed as failure:
                    self._note(failure, attempts)
                    if self._may_retry(request, failure.server, attempts):
                        continue
                    if failure.answer is None:
                        raise self._last(failure, attempts) from failure
                    await _pass_on(failure.answer, client)
                return
        except (asyncio.CancelledError, ClientGone):
            attempts.left = True
            raise
        finally:
            self._leave(request, attempts)
            self._release(request, attempts)
            attempts.leave()
            attempts.find_out_no_more()

    def _check(self, request: Request) -> None:
        """Refuses what SGLang does not take over from a prefill."""
        sglang = self._prefill.have(Engine.SGLANG) or self._decode.have(Engine.SGLANG)
        if sglang and request.body.choices > 1:
            text = f"n is {request.body.choices}; where SGLang serves, a prefill is for one completion"
            raise refusal(ErrorCode.BAD_MESSAGE, text)
        if request.body.for_one_server and self._decode.have(Engine.SGLANG):
            raise refusal(ErrorCode.BAD_MESSAGE, "use_beam_search: SGLang's decode servers compute no prompts")

    async def close(self) -> None:
        """Waits until what clients that are gone have left is ended."""
        await self._conversations.close()
        await self._cleanup.close()

    async def _attempt(self, request: Request, client: Reply, attempts: Attempts) -> None:
        pair = self._affinity.find(request.body.prefixes)
        reached = None
        if self._needs_prefill(request, attempts):
            reached = await self._reached(attempts)
            server = self._choose(self._prefill, attempts, pair.prefill if pair else None)
            if not (attempts.in_turn or attempts.tried or self._decode.have(Engine.SGLANG)):
                prefill = partial(self._prefill_answer, turn=attempts.turn)
                attempts.early = self._producers.begin(request, server, prefill)
            if attempts.early is None and not await self._prefilled(request, client, server, attempts):
                return
            attempts.prefill = server
        # Others may have rested, but nobody has connected to them.
        server = reached or self._choose(self._decode, attempts, pair.decode if pair else None)
        sent = Sent()
        try:
            if attempts.early is None:
                await self._decoded(request, client, server, attempts, sent)
                return
            decoded = await self._both(request, client, server, attempts, sent)
        except ServerFailed:
            if sent.whole:  # whether the server has the offer, and lets go of it, nobody knows
                self._put_off(attempts)
            raise
        if not decoded:
            self._metrics.early.labels("again").inc()
            await self._in_turn(request, client, attempts)

    async def _both(self, request: Request, client: Reply, server: Server, attempts: Attempts, sent: Sent) -> bool:
        """Has `server` decode while the prefill goes on. False if what the prefill answers must be looked at first."""
        early = attempts.early
        assert early is not None  # noqa: S101  # it was begun
        attempts.answered = False
        decoding = asyncio.create_task(self._decoded(request, client, server, attempts, sent))
        try:
            if not await early.beside(decoding, lambda: attempts.answered):
                return False
        except ServerFailed as failure:
            if not sent.whole:
                raise  # another one gets the same offer
            if early.is_as_told:
                attempts.early, attempts.prefilled = None, early.prefilled
                raise
            if failure.is_certain:
                self._leave(request, attempts)
                raise
            logger.warning("%s, while its prefill goes on", failure.text)
            return False  # the prefill may have failed, or have lost its offer
        return True

    async def _in_turn(self, request: Request, client: Reply, attempts: Attempts) -> None:
        """Waits for the prefill, and goes on with what it answers."""
        early = attempts.early
        assert early is not None  # noqa: S101  # it goes on
        attempts.in_turn = True
        await asyncio.wait((early.answer,))
        attempts.early = None
        if not await self._use(early.answer.result(), client, early.server, attempts):
            return
        if early.is_as_told:  # the decode server could not use it
            self._put_off(attempts)
        await self._attempt(request, client, attempts)

    async def _reached(self, attempts: Attempts) -> Server | None:
        """A decode server that can be reached, if all have failed; requests take turns at finding one.

        An offer that none takes stands in the prefill engine's cache for its ttl, and such offers soon fill that.
        """
        if not all(server.failures for server in self._decode.all if server not in attempts.tried):
            return None
        server = self._choose(self._decode, attempts, None)
        await self._upstream.reach(server)
        return server

    def _choose(self, servers: Servers, attempts: Attempts, known_by: Server | None) -> Server:
        now = time.monotonic()
        chosen = servers.choose(now, tried=attempts.tried, known_by=known_by)
        assert chosen is not None  # noqa: S101  # `_may_retry` saw one
        if until := ask(chosen, now):
            attempts.finds_out[chosen] = now, until
        return chosen

    async def _prefilled(self, request: Request, client: Reply, server: Server, attempts: Attempts) -> bool:
        """Gets `attempts.prefilled` from `server`. False if it refused the request, which the client then knows."""
        attempts.leave()
        if server.engine is Engine.SGLANG:
            attempts.meeting = Meeting(self._upstream, request, server)
            return await self._use(await attempts.meeting.prefilled(), client, server, attempts)
        asking = asyncio.create_task(self._prefill_answer(request, server, "", attempts.turn))
        try:
            answer = await asyncio.shield(asking)
        except asyncio.CancelledError:
            self._cleanup.leave(request, asking, attempts)
            raise
        return await self._use(answer, client, server, attempts)

    async def _use(self, answer: Prefilled | Whole, client: Reply, server: Server, attempts: Attempts) -> bool:
        """Gets `attempts.prefilled` from an answer. False if that refuses the request, as the client then knows."""
        if isinstance(answer, Whole):
            await _pass_on(answer, client)
            return False
        attempts.prefilled = answer
        self._has_prefilled(server, answer, attempts)
        return True

    async def _prefill_answer(
        self, request: Request, server: Server, offer: str, turn: msgspec.Raw | None = None
    ) -> Prefilled | Whole:
        """What the server answers; of a refusal all of it, for the client."""
        with_token = self._decode.have(Engine.SGLANG)
        body = request.body.for_prefill(offer, turn, with_token=with_token)
        async with self._upstream.post(server, request.path, body, request.headers, Sent()) as answer:
            if answer.status != HTTPStatus.OK:
                return await answer.refusal()
            whole = await answer.read(limits.PREFILL_ANSWER_BYTES)
        prefilled = prefilled_of(whole, with_token=with_token)
        if prefilled is None:
            text = "answered without kv_transfer_params: does its --kv-transfer-config name a connector for P/D?"
            raise ServerFailed(ErrorCode.PEER_LOST, server, text)
        return prefilled

    async def _decoded(self, request: Request, client: Reply, server: Server, attempts: Attempts, sent: Sent) -> None:
        early, streamed = attempts.early, request.body.streamed
        prefilled = attempts.prefilled if early is None else early.prefilled
        turn = self._conversations.name(request, server, prefilled)
        room = new_room() if attempts.meeting is None else attempts.meeting.room
        body = request.body.for_decode(prefilled, server.engine, room, turn)
        async with self._upstream.post(
            server, request.path, body, request.headers, sent, streamed=streamed, early=early is not None
        ) as answer:
            if answer.status != HTTPStatus.OK:
                attempts.answered = True  # whatever the prefill says meanwhile
                whole = await answer.refusal()
                attempts.refused_by = server
                await _pass_on(whole, client)
                return
            first = await answer.beginning()
            attempts.prefilled, attempts.taken, attempts.answered = None, True, True
            if early is not None:
                self._metrics.early.labels("done").inc()
            attempts.served(server)
            attempts.asked_first = server
            self._release(request, attempts)
            self._metrics.first_token_seconds.observe(time.monotonic() - request.arrived)
            if attempts.prefill is not None:
                self._affinity.learn(request.body.prefixes, Pair(attempts.prefill, server))
            try:
                await _relay(answer, first, client)
            finally:
                if turn and answer.is_whole:
                    self._conversations.keep(request, server, turn)

    def _release(self, request: Request, attempts: Attempts) -> None:
        """Has all offers released that are left: the request is settled.

        A request that fails again and again may be at fault, so releases of it go to no more servers than itself may.
        """
        attempts.settled = True
        self._put_off(attempts)
        self._cleanup.release(request, attempts)

    def _put_off(self, attempts: Attempts) -> None:
        """Notes the offer that is left, if one is, for when another server has the request."""
        if attempts.prefilled is not None:
            if attempts.meeting is not None:
                attempts.leave()
            else:
                attempts.left_over.append(attempts.prefilled)
            attempts.prefilled = None

    def _leave(self, request: Request, attempts: Attempts) -> None:
        """Ends the prefill that goes on, if one does, and has its offer released unless a decode server does that."""
        early, attempts.early = attempts.early, None
        if early is None:
            return
        if (prefilled := early.answered) is not None:
            self._has_prefilled(early.server, prefilled, attempts)
        elif isinstance(early.failure, ServerFailed):
            self._note(early.failure, attempts)
        if attempts.taken and not early.answer.done():
            attempts.served(early.server)
        if attempts.taken and (early.is_as_told or not early.answer.done()):
            early.answer.cancel()
        else:
            self._cleanup.leave(request, early.answer, attempts)

    def _has_prefilled(self, server: Server, prefilled: Prefilled, attempts: Attempts) -> None:
        """`server` has answered that."""
        if server.engine is Engine.VLLM:
            self._producers.learn(server, prefilled.params)
        attempts.served(server)

    def _note(self, failure: ServerFailed, attempts: Attempts) -> None:
        attempts.failed(failure)
        self._metrics.failures.labels(failure.server.role, failure.server.url).inc()
        logger.warning("%s", failure.text)

    def _needs_prefill(self, request: Request, attempts: Attempts) -> bool:
        return attempts.prefilled is None and attempts.early is None and not request.body.for_one_server

    def _may_retry(self, request: Request, failed: Server, attempts: Attempts) -> bool:
        needed = (self._prefill, self._decode) if self._needs_prefill(request, attempts) else (self._decode,)
        if len(attempts.tried) >= limits.ATTEMPTS or any(attempts.tried.issuperset(role.all) for role in needed):
            return False
        self._metrics.retries.labels(failed.role).inc()
        return True

    def _last(self, failure: ServerFailed, attempts: Attempts) -> KvdError:
        others = len(attempts.tried) - 1
        more = f"; {others} more failed before" if others else f"; there is no other {failure.server.role} server"
        return refusal(failure.code, failure.text + more)


async def _pass_on(answer: Whole, client: Reply) -> None:
    await client.begin(answer.status, answer.headers)
    await client.send(answer.body)


async def _relay(answer: Answer, first: bytes, client: Reply) -> None:
    """Passes the answer on as it comes; the client's pace is the server's."""
    await client.begin(answer.status, answer.headers)
    part, errors = first, Errors()
    try:
        while part:
            await client.send(part)
            if answer.is_stream and errors.are_in(part):
                text = f"{answer.server.name} failed in the middle of its answer, and said why"
                raise BrokenOff(ErrorCode.PEER_LOST, text)
            part = await answer.part()
    except ServerFailed as failure:
        raise BrokenOff(failure.code, f"{failure.text}, in the middle of its answer") from failure
