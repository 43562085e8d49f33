"""What the router takes in at a time: requests in flight, and bytes of their bodies."""

import asyncio
import contextlib
from collections.abc import Iterator

from aiohttp import web

from kvd import limits
from kvd.errors import BadRequest, ErrorCode, Unavailable
from kvd.router.reply import ClientGone


class Intake:
    """Counts what is in flight, and refuses more."""

    def __init__(self) -> None:
        self.requests = 0
        self.body_bytes = 0
        self.idle = asyncio.Event()
        """Set while nothing is in flight."""
        self.idle.set()

    @contextlib.contextmanager
    def admitted(self) -> Iterator["Intake.Room"]:
        """Room for one request and its body, until left.

        Raises:
            Unavailable: `OVERLOADED`, there are too many.

        """
        if self.requests >= limits.ROUTER_REQUESTS:
            text = f"{self.requests} requests are in flight, and no more are taken: try again later"
            raise Unavailable(ErrorCode.OVERLOADED, text)
        self.requests += 1
        self.idle.clear()
        room = Intake.Room(self)
        try:
            yield room
        finally:
            self.body_bytes -= room.taken
            self.requests -= 1
            if not self.requests:
                self.idle.set()

    class Room:
        """What one request has taken."""

        def __init__(self, intake: "Intake") -> None:
            self._intake = intake
            self.taken = 0

        async def read(self, request: web.BaseRequest) -> bytes:
            """The request's body.

            Raises:
                BadRequest: `TOO_LARGE`; `BAD_MESSAGE`, it is encoded wrongly.
                ClientGone: `CANCELLED`.
                Unavailable: `OVERLOADED` if bodies take too much memory, `DEADLINE` if this one comes too slowly.

            """
            self._check(request.content_length or 0)
            parts = []
            try:
                async with asyncio.timeout(limits.ROUTER_BODY_SECONDS):
                    async for part in request.content.iter_any():
                        self._check(self.taken + len(part))
                        self.taken += len(part)
                        self._intake.body_bytes += len(part)
                        parts.append(part)
            except web.RequestPayloadError as error:
                raise BadRequest(ErrorCode.BAD_MESSAGE, f"the body is not HTTP: {error}") from error
            except ConnectionError as error:
                raise ClientGone(ErrorCode.CANCELLED, "the client sent a part of its body only") from error
            except TimeoutError as error:
                text = f"{self.taken} bytes of the body came within {limits.ROUTER_BODY_SECONDS:.0f} s, not all of it"
                raise Unavailable(ErrorCode.DEADLINE, text) from error
            return b"".join(parts)

        def _check(self, size: int) -> None:
            if size > limits.ROUTER_BODY_BYTES:
                text = f"the body has {size} bytes or more; at most {limits.ROUTER_BODY_BYTES} are taken"
                raise BadRequest(ErrorCode.TOO_LARGE, text)
            if self._intake.body_bytes - self.taken + size > limits.ROUTER_BODIES_BYTES:
                text = f"the bodies of {self._intake.requests} requests fill the memory for them: try again later"
                raise Unavailable(ErrorCode.OVERLOADED, text)
