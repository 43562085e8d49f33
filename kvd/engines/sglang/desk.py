"""Where a router gets the ticket of a room: it asks the prefill server's bootstrap server, which asks as a decode
engine would.

So a request that is prefilled here can be decoded by an engine that is no SGLang. The bootstrap server runs in another
process than the engine, whose control socket it knows.
"""

import asyncio
import contextlib
import secrets
from collections.abc import Callable
from typing import Any

import zmq
import zmq.asyncio

from kvd.engines.sglang import handoff, messages
from kvd.engines.sglang.control import Outbox, read_messages, tcp
from kvd.engines.sglang.messages import Abandoned, Address, Offered, Refused, Wanted
from kvd.errors import ErrorCode, Unavailable, refusal
from kvd.limits import MAX_MESSAGE_BYTES, MAX_UNEXPECTED_ROOMS, MAX_UNREAD_ANSWERS
from kvd.protocol import ticket as tickets


class Desk:
    """On one event loop. `engine` says where the control sockets of the prefill engine's ranks are, in their order.

    It says nothing before all of them have registered.
    """

    def __init__(self, engine: Callable[[], tuple[Address, ...]]) -> None:
        self._engine = engine
        self._context = zmq.asyncio.Context()
        self._outbox = Outbox(self._context)
        self._here: Address | None = None
        self._listening: asyncio.Task[None] | None = None
        self._waiting: dict[bytes, asyncio.Future[Offered]] = {}
        """By nonce."""

    async def params(self, room: int) -> dict[str, Any]:
        """The parameters of the offer of a room, as soon as its prompt is computed. Being cancelled gives it up.

        Raises:
            Unavailable: `PEER_LOST`, the engine is not there yet, or does not send it; `OVERLOADED`.
            BadRequest: `BAD_TICKET`, those of its ranks do not fit each other.

        """
        ranks = self._engine()
        if not ranks:
            raise refusal(ErrorCode.PEER_LOST, "the prefill engine has not registered yet")
        if len(self._waiting) + len(ranks) > MAX_UNEXPECTED_ROOMS:
            raise refusal(ErrorCode.OVERLOADED, f"{len(self._waiting)} tickets are waited for")
        host, port = self._listen(ranks[0][0])
        nonces = [secrets.token_bytes(16) for _ in ranks]
        told = [asyncio.get_running_loop().create_future() for _ in ranks]
        self._waiting.update(zip(nonces, told, strict=True))
        try:
            for rank, nonce in zip(ranks, nonces, strict=True):
                self._outbox.send(rank, Wanted(room, nonce, 0, host, port))
            offered = await asyncio.gather(*told)
        except asyncio.CancelledError:
            for rank, nonce in zip(ranks, nonces, strict=True):
                with contextlib.suppress(Unavailable):  # what it offers ends with its time
                    self._outbox.send(rank, Abandoned(room, nonce, "the router does not wait any more"))
            raise
        finally:
            for nonce in nonces:
                del self._waiting[nonce]
        return handoff.write(tickets.join(each.ticket for each in offered), offered[0].prompt)

    def close(self) -> None:
        """Ends what it has opened."""
        if self._listening is not None:
            self._listening.cancel()
        self._context.destroy(linger=0)

    def _listen(self, host: str) -> Address:
        """Where engines answer: this process is on the host of the engine, whose address others reach."""
        if self._here is None:
            socket = self._context.socket(zmq.PULL)
            socket.setsockopt(zmq.IPV6, ":" in host)
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
            socket.setsockopt(zmq.RCVHWM, MAX_UNREAD_ANSWERS)
            self._here = host, socket.bind_to_random_port(tcp(host))
            self._listening = asyncio.create_task(read_messages(socket, self._answered))
        return self._here

    def _answered(self, message: messages.Message) -> None:
        told = self._waiting.get(message.nonce)
        if told is None or told.done():
            return
        match message:
            case Offered():
                told.set_result(message)
            case Refused(reason=reason):
                told.set_exception(refusal(ErrorCode.PEER_LOST, f"the prefill engine does not send it: {reason}"))
            case _:
                pass  # for a prefill engine
