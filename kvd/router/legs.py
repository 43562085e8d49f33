"""A prefill on a server of SGLang's: asked of the engine, and of its bootstrap server, which has the room's ticket.

The engine answers only when a decode server has read its offer. If it is not waited for, it withdraws that.
"""

import asyncio
from http import HTTPStatus

from kvd.errors import ErrorCode
from kvd.router import limits
from kvd.router.answer import ServerFailed, Whole
from kvd.router.body import Request, new_room
from kvd.router.engines import Prefilled, prefilled_of
from kvd.router.servers import Server
from kvd.router.upstream import Sent, Upstream


class Meeting:
    """A request that is prefilled in a room: `end` it when nothing of it is wanted any more."""

    def __init__(self, upstream: Upstream, request: Request, server: Server) -> None:
        self._server = server
        self.room = new_room()
        """An SGLang that decodes must be in it, too: it compares the number with that of the record."""
        self._prefill = asyncio.create_task(self._answer(upstream, request))
        self._params = asyncio.create_task(upstream.params(server, self.room))
        for task in (self._prefill, self._params):
            task.add_done_callback(_look)

    async def prefilled(self) -> Prefilled | Whole:
        """What the room has been offered, or the answer of a server that refuses the request.

        Raises:
            ServerFailed: It does neither.

        """
        await asyncio.wait({self._prefill, self._params}, return_when=asyncio.FIRST_COMPLETED)
        if self._prefill.done():  # before it was read: it is not offered
            answer = self._prefill.result()
            if answer is not None:
                return answer
            raise ServerFailed(
                ErrorCode.PEER_LOST, self._server, "answered before its offer was read: does it run kvd?"
            )
        found = prefilled_of(self._params.result(), with_token=False)
        if found is None:
            raise ServerFailed(ErrorCode.PEER_LOST, self._server, "has a bootstrap server that tells no parameters")
        return found

    def end(self) -> None:
        """Aborts it, unless it has ended."""
        self._prefill.cancel()
        self._params.cancel()

    async def _answer(self, upstream: Upstream, request: Request) -> Whole | None:
        """What refuses the request; None once its offer was read, as nothing of that answer is needed."""
        body = request.body.for_room(self._server.place, self.room)
        async with upstream.post(self._server, request.path, body, request.headers, Sent()) as answer:
            if answer.status != HTTPStatus.OK:
                return await answer.refusal()
            await answer.read(limits.PREFILL_ANSWER_BYTES)
            return None


def _look(task: "asyncio.Task[Whole | None] | asyncio.Task[bytes]") -> None:
    """At what nobody may wait for any more."""
    if not task.cancelled():
        task.exception()
