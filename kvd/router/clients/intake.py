"""What the router takes in at a time: requests in flight, and bytes of their bodies."""

import asyncio
import contextlib
from collections.abc import Iterator

from aiohttp import HttpVersion11, web

from kvd.errors import ErrorCode, refusal
from kvd.router import limits
from kvd.router.reply import ClientGone
from kvd.router.shares import Shares


class Intake:
    """Counts what is in flight, and refuses more."""

    def __init__(self) -> None:
        self.requests = 0
        """Those whose body still comes included, which take no place of others: slow clients would take all."""
        self.idle = asyncio.Event()
        """Set while there are none."""
        self.idle.set()
        self.whole = Shares()
        """Requests with their whole body."""
        self.body_bytes = Shares()
        self._coming: dict[str, dict[Intake.Room, None]] = {}
        """By client, oldest first: those whose body still comes."""

    @contextlib.contextmanager
    def room(self, client: str) -> Iterator["Intake.Room"]:
        """Room for one request of `client`, until left."""
        self.requests += 1
        self.idle.clear()
        room = Intake.Room(self, client)
        try:
            yield room
        finally:
            room.leave()
            self.requests -= 1
            if not self.requests:
                self.idle.set()

    def _make_room(self, client: str, more: int) -> bool:
        """Whether there is room for so many bytes of `client`, if need be of those whose bodies do not come to an end.

        The largest goes of the client with the most bytes, if that has more than this one would have.
        """
        while self.body_bytes.total + more > limits.BODIES_BYTES:
            coming = {each: sum(room.taken for room in rooms) for each, rooms in self._coming.items()}
            most = max(coming, key=lambda each: coming[each], default=client)
            if coming.get(most, 0) <= coming.get(client, 0) + more:
                return False
            max(self._coming[most], key=lambda room: room.taken).lose()
        return True

    class Room:
        """What one request has taken."""

        def __init__(self, intake: "Intake", client: str) -> None:
            self._intake = intake
            self._client = client
            self.taken = 0
            """Bytes of its body."""
            self._whole = 0
            self._until = asyncio.timeout(limits.BODY_SECONDS)
            """For its body."""
            self._lost = False

        def leave(self) -> None:
            """Gives it back."""
            self._ended()
            self._intake.body_bytes.add(self._client, -self.taken)
            self._intake.whole.add(self._client, -self._whole)

        def lose(self) -> None:
            """Its body is not read any further, and takes no room from now on."""
            self._lost = True
            if not self._until.expired():
                self._until.reschedule(0.0)
            self._ended()
            self._intake.body_bytes.add(self._client, -self.taken)
            self.taken = 0

        def _ended(self) -> None:
            coming = self._intake._coming.get(self._client, {})
            coming.pop(self, None)
            if not coming:
                self._intake._coming.pop(self._client, None)

        async def read(self, request: web.BaseRequest) -> bytes:
            """The request's body; the request then counts as in flight.

            Raises:
                BadRequest: `TOO_LARGE`; `BAD_MESSAGE`, it is encoded wrongly.
                ClientGone: `CANCELLED`.
                Unavailable: `OVERLOADED` if there are too many requests or bodies, of this client or of all;
                    `DEADLINE` if this body comes too slowly.

            """
            self._check(request.content_length or 0)
            parts = []
            try:
                await _let_it_come(request)
                async with self._until:
                    self._intake._coming.setdefault(self._client, {})[self] = None
                    async for part in request.content.iter_any():
                        self._check(self.taken + len(part))
                        self.taken += len(part)
                        self._intake.body_bytes.add(self._client, len(part))
                        parts.append(part)
                if self._lost:  # just as it ended: it is counted no more
                    raise TimeoutError  # noqa: TRY301
            except web.RequestPayloadError as error:
                raise refusal(ErrorCode.BAD_MESSAGE, f"the body is not HTTP: {error}") from error
            except ConnectionError as error:
                raise ClientGone(ErrorCode.CANCELLED, "the client sent a part of its body only") from error
            except TimeoutError as error:
                if self._lost:
                    text = "bodies of other clients took the place of this one, which did not end: try again later"
                    raise refusal(ErrorCode.OVERLOADED, text) from error
                text = f"{self.taken} bytes of the body came within {limits.BODY_SECONDS:.0f} s, not all of it"
                raise refusal(ErrorCode.DEADLINE, text) from error
            self._ended()
            self._enter()
            return b"".join(parts)

        def _check(self, size: int) -> None:
            if size > limits.BODY_BYTES:
                text = f"the body has {size} bytes or more; at most {limits.BODY_BYTES} are taken"
                raise refusal(ErrorCode.TOO_LARGE, text)
            bodies, more = self._intake.body_bytes, size - self.taken
            text = "the bodies of {} fill the memory for them: try again later"
            if bodies.of(self._client) + more > limits.CLIENT_BODIES_BYTES:
                raise refusal(ErrorCode.OVERLOADED, text.format(self._client))
            if not self._intake._make_room(self._client, more):
                raise refusal(ErrorCode.OVERLOADED, text.format(f"{self._intake.requests} requests"))

        def _enter(self) -> None:
            whole, text = self._intake.whole, "{} requests{} are in flight, and no more are taken: try again later"
            if whole.of(self._client) >= limits.CLIENT_REQUESTS:
                raise refusal(ErrorCode.OVERLOADED, text.format(whole.of(self._client), f" of {self._client}"))
            if whole.total >= limits.REQUESTS:
                raise refusal(ErrorCode.OVERLOADED, text.format(whole.total, ""))
            self._whole = 1
            whole.add(self._client, 1)


async def _let_it_come(request: web.BaseRequest) -> None:
    """Tells a client that waits for leave to send its body that it may, as curl does with more than 1 MiB."""
    if request.version >= HttpVersion11 and request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # the answer has not begun
