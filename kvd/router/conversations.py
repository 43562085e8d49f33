"""What decode servers keep of conversations, for the prefill of the next turn.

A decode server that is told a name for the turn (`kvd_turn`) keeps its blocks. When its answer has ended, it is asked
for the turn's transfer parameters by that name, with a request for one token: vLLM gives none in answers that it
streams, and they are not for clients. The next turn's prefill server gets them, once.

The next turn is one of the same conversation: that which a client names, or a chat that begins with the same messages.
Who asks is told apart by `Authorization` and by vLLM's `cache_salt`. Which tokens the two turns have in common, and
whether the blocks are still there, the prefill server finds out. What nobody asks for ends by the bounds of the decode
server.
"""

import asyncio
import contextlib
import hashlib
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

import msgspec
from multidict import CIMultiDict

from kvd.router import limits
from kvd.router.answer import ServerFailed
from kvd.router.body import Request, knows_turns, seconds_of
from kvd.router.engines import NULL, Engine, Prefilled, prefilled_of
from kvd.router.metrics import Metrics, Turn
from kvd.router.servers import Server
from kvd.router.upstream import Sent, Upstream

logger = logging.getLogger(__name__)

_REQUEST_ID: Final = "X-Request-Id"
_CONVERSATION: Final = "X-Conversation-Id"
_SALT: Final = "cache_salt"
_FIELD: Final = "conversation_id"
"""Of vLLM's benchmark of conversations, and of its proxy for them."""
_NO_NAME: Final = {bytes(NULL), b'""'}
"""What clients send that leave it unset: it would be one conversation of all."""

_COMPLETIONS: Final = "/v1/completions"
_CHAT: Final = "/v1/chat/completions"


@dataclass(slots=True)
class _Turn:
    """The end of a conversation: its parameters are here, or on their way."""

    params: "asyncio.Future[msgspec.Raw | None]"
    until: float
    """Monotonic time; later the decode server has them no more."""


class Conversations:
    """The last `limits.TURNS` turns; none if it `keeps` none."""

    def __init__(self, upstream: Upstream, metrics: Metrics, *, keeps: bool) -> None:
        self._upstream = upstream
        self._keeps = keeps
        self._metrics = metrics
        self._turns: OrderedDict[bytes, _Turn] = OrderedDict()
        self._asking: set[asyncio.Task[None]] = set()
        metrics.kept_turns.set_function(lambda: len(self._turns))

    def name(self, request: Request, server: Server, prefilled: Prefilled | None) -> str:
        """A name for the turn of `request`, which `server` is to decode; empty if nothing of it is to be kept."""
        wanted = self._keeps and request.body.choices == 1 and _own_key(request) is not None
        wanted = wanted and server.engine is Engine.VLLM and prefilled is not None and knows_turns(prefilled.params)
        if not wanted or len(self._asking) >= limits.TURNS_ASKED:
            return ""
        return "kvdt1." + secrets.token_hex(16)  # who knows it may ask for the ticket: engines keep it out of logs

    async def take(self, request: Request) -> msgspec.Raw | None:
        """What the turn before that of `request` left, if there was one. It is forgotten here."""
        key = next((key for key in _keys(request) if key in self._turns), None) if self._turns else None
        if key is None:
            return None
        turn = self._turns.pop(key)
        if turn.until <= time.monotonic():
            self._metrics.turns.labels(Turn.EXPIRED).inc()
            return None
        params = None
        with contextlib.suppress(TimeoutError):  # it may be asked for just now
            params = await asyncio.wait_for(asyncio.shield(turn.params), limits.TURN_WAIT_SECONDS)
        self._metrics.turns.labels(Turn.MISSED if params is None else Turn.FOUND).inc()
        return params

    def keep(self, request: Request, server: Server, name: str) -> None:
        """`server` has answered `request` to its end, and may have kept the turn that it was told the `name` of."""
        if len(self._asking) >= limits.TURNS_ASKED:  # more have ended at once than were asked for when they began
            self._metrics.turns.labels(Turn.NOT_KEPT).inc()
            return
        now = time.monotonic()
        turn = _Turn(asyncio.get_running_loop().create_future(), now + limits.TURN_SECONDS)
        key = _own_key(request)
        assert key is not None  # noqa: S101  # the turn got a name
        self._turns.pop(key, None)
        self._turns[key] = turn
        while len(self._turns) > limits.TURNS or next(iter(self._turns.values())).until < now:
            self._turns.popitem(last=False)
        body, headers = request.body.for_turn(name), CIMultiDict(request.headers)
        headers[_REQUEST_ID] += "-turn"  # both servers' logs name requests by it
        # The client's own body may be large, and is counted no more: nothing of it is kept.
        task = asyncio.create_task(self._ask(server, body, headers, key, turn))
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    async def close(self) -> None:
        """Stops asking."""
        for task in self._asking:
            task.cancel()
        await asyncio.gather(*self._asking, return_exceptions=True)

    async def _ask(self, server: Server, body: bytes, headers: Mapping[str, str], key: bytes, turn: _Turn) -> None:
        params: msgspec.Raw | None = None
        try:
            params = await self._asked(server, body, headers)
        except (ServerFailed, TimeoutError) as error:
            logger.warning("what %s keeps of a conversation is not known: %s", server.name, error)
        finally:
            turn.params.set_result(params)
            if params is None and self._turns.get(key) is turn:
                del self._turns[key]
        self._metrics.turns.labels(Turn.KEPT if params else Turn.NOT_KEPT).inc()
        turn.until = time.monotonic() + min(limits.TURN_SECONDS, seconds_of(params) if params else 0)

    async def _asked(self, server: Server, body: bytes, headers: Mapping[str, str]) -> msgspec.Raw | None:
        async with (
            asyncio.timeout(limits.TURN_ASK_SECONDS),
            self._upstream.post(server, _COMPLETIONS, body, headers, Sent(), streamed=False) as answer,
        ):
            said = await answer.read(limits.TURN_BYTES)
        found = prefilled_of(said, with_token=False) if answer.status == HTTPStatus.OK else None
        return None if found is None else found.params


def _own_key(request: Request) -> bytes | None:
    """By what this turn is found again; None if it is no turn of a conversation. A chat's: its beginning up to here."""
    return next(_keys(request), None)


def _keys(request: Request) -> Iterator[bytes]:
    """By what the turn before that of `request` may be found, first its own: a chat has all of its beginnings."""
    fields = request.body.fields
    who = hashlib.blake2b(digest_size=16, person=b"kvd router")
    for part in (_header(request, "Authorization"), bytes(fields.get(_SALT, b""))):
        who.update(len(part).to_bytes(4, "little") + part)
    field = bytes(fields.get(_FIELD, NULL))
    named = _header(request, _CONVERSATION) or (b"" if field in _NO_NAME else field)
    if named:
        who.update(b"\0" + bytes(fields.get("model", b"")) + b"\0" + named)
        yield who.digest()
    elif request.path == _CHAT:
        for prefix in reversed(request.body.prefixes):
            key = who.copy()
            key.update(prefix)
            yield key.digest()


def _header(request: Request, name: str) -> bytes:
    """The bytes that the client sent, also where they are no UTF-8; none if it sent no such header."""
    return request.headers.get(name, "").encode(errors="surrogateescape")
