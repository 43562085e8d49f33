"""Prefills whose blocks are read while they go on: the decode server gets the request at the same time.

A prefill server that can do that says in its answers where its daemons are (`kvd_producer`). With that, and a random
text that names the offer (`kvd_offer`), a decode server needs nothing of the prefill's answer (`docs/vllm.md`). Whether
it was told right, that answer shows: it has the same two, or it has a ticket.
"""

import asyncio
import secrets
from collections.abc import Callable, Coroutine
from typing import Any, Final

import msgspec

from kvd.router import limits
from kvd.router.answer import Whole
from kvd.router.body import Request
from kvd.router.engines import Prefilled, decode
from kvd.router.servers import Server

_RANDOM_BYTES: Final = 24
"""Nobody guesses the text, and no two are alike."""

Prefill = Callable[[Request, Server, str], Coroutine[Any, Any, Prefilled | Whole]]


class _Said(msgspec.Struct):
    """What this module reads of a prefill server's parameters."""

    kvd_offer: str = ""
    kvd_producer: Any = None


class Early:
    """A prefill at `server` that goes on, and what decode servers are told of it: before its answer."""

    def __init__(self, request: Request, server: Server, producer: Any, prefill: Prefill) -> None:
        self.server = server
        self._said = _Said("kvdo1." + secrets.token_urlsafe(_RANDOM_BYTES), producer)
        told = {"do_remote_prefill": True, "do_remote_decode": False, "kvd_consumers": request.body.choices}
        self.prefilled = Prefilled(msgspec.Raw(msgspec.json.encode(told | msgspec.structs.asdict(self._said))))
        self.answered: Prefilled | None = None
        """What the prefill has answered, unless it goes on, has failed or was refused."""
        self.is_as_told = False
        """Whether it has, and its offer is the one that decode servers were told of."""
        self.answer = asyncio.create_task(self._answer(request, prefill))

    @property
    def failure(self) -> BaseException | None:
        """What the prefill failed with, if it has."""
        return self.answer.exception() if self.answer.done() and not self.answer.cancelled() else None

    async def _answer(self, request: Request, prefill: Prefill) -> Prefilled | Whole:
        answer = await prefill(request, self.server, self._said.kvd_offer)
        if isinstance(answer, Prefilled):
            self.answered, self.is_as_told = answer, _said(answer.params) == self._said
        return answer

    async def beside(self, decoding: "asyncio.Task[None]", has_begun: Callable[[], bool]) -> bool:
        """Waits for `decoding`, whose failure it raises.

        False if that was stopped: it had not begun its answer, and the prefill ended otherwise than it was told.
        """
        try:
            await asyncio.wait((decoding, self.answer), return_when=asyncio.FIRST_COMPLETED)
            if not decoding.done() and not has_begun() and not self.is_as_told:
                return False
            await decoding
        finally:
            await _stop(decoding)
        return True


class Producers:
    """Where the daemons of prefill servers are, as these have said."""

    def __init__(self) -> None:
        self._of: dict[Server, Any] = {}

    def learn(self, server: Server, params: msgspec.Raw) -> None:
        """A prefill server has answered with these `params`."""
        producer = _said(params).kvd_producer
        if producer is None:
            self._of.pop(server, None)
        else:
            self._of[server] = producer

    def begin(self, request: Request, server: Server, prefill: Prefill) -> Early | None:
        """Begins a prefill whose blocks can be read from now on.

        None if the server has not said that it takes that, or has others to do first.
        """
        producer = self._of.get(server)
        if producer is None or server.in_flight >= limits.EARLY_REQUESTS:
            return None
        return Early(request, server, producer, prefill)


async def _stop(task: "asyncio.Task[Any]") -> None:
    """Returns when it has ended; what it then raises is not wanted."""
    task.cancel()
    await asyncio.wait((task,))
    if not task.cancelled():
        task.exception()


def _said(params: msgspec.Raw) -> _Said:
    try:
        said: _Said = decode(params, _Said)
    except msgspec.DecodeError:
        return _Said()
    return said
