"""What a client asks for, and how it is answered."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from kvd.router.body import Body


@dataclass(frozen=True, slots=True)
class Request:
    """A request for `path` with `body`, and the `headers` that servers get too."""

    path: str
    body: Body
    headers: Mapping[str, str]
    arrived: float
    """Monotonic time."""


class Client(Protocol):
    """Who waits for an answer."""

    async def begin(self, status: int, headers: Mapping[str, str]) -> None:
        """Sends the head of the answer."""

    async def send(self, part: bytes) -> None:
        """Sends part of the body, and waits while the client is slow.

        Raises:
            Unavailable: `CANCELLED`, the client takes nothing more.

        """
