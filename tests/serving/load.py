"""Requests without a pause over a pair of servers whose processes may be killed meanwhile."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Protocol

from tests.support.patience import PATIENCE
from tests.vllm.same_tokens import assert_same
from tests.vllm.testbed.client import Completion
from tests.vllm.testbed.http import HttpError
from tests.vllm.waiting import until


class Pair(Protocol):
    """A prefill and a decode server."""

    async def complete(self, prompt: list[int], tokens: int, **more: Any) -> Completion:
        """The completion of a prompt, or `HttpError`."""


def nothing() -> dict[str, Any]:
    return {}


async def one(
    pair: Pair, prompt: list[int], expected: Completion, more: Callable[[], dict[str, Any]] = nothing
) -> HttpError | None:
    """The error in which a request ends; any tokens are the right ones, and it ends. `more` gives it further fields."""
    try:
        async with asyncio.timeout(PATIENCE):
            completion = await pair.complete(prompt, len(expected.tokens), **more())
    except HttpError as error:
        return error
    assert_same(completion, expected)
    return None


async def recovers(pair: Pair, wanted: Sequence[tuple[list[int], Completion]]) -> None:
    """Returns when a request got the right tokens; then all do."""

    async def succeeds() -> bool:
        return await one(pair, *wanted[0]) is None

    await until(succeeds)
    for prompt, want in wanted:
        assert await one(pair, prompt, want) is None


class Load:
    """Requests without a pause; counts how they ended."""

    def __init__(
        self,
        pair: Pair,
        expected: list[tuple[list[int], Completion]],
        more: Callable[[], dict[str, Any]] = nothing,
    ) -> None:
        self._pair = pair
        self._expected = itertools.cycle(expected)
        self._more = more
        self._stopping = False
        self._changed = asyncio.Condition()
        self.right = 0
        self.errors: list[HttpError] = []

    async def _run(self) -> None:
        while not self._stopping:
            error = await one(self._pair, *next(self._expected), self._more)
            if error is None:
                self.right += 1
            else:
                self.errors.append(error)
            async with self._changed:
                self._changed.notify_all()
            if error is not None:
                await asyncio.sleep(0.1)  # a server that is dead refuses at once

    async def answered(self, count: int) -> None:
        """Returns when so many more requests got the right tokens."""
        wanted = self.right + count
        async with self._changed:
            await self._changed.wait_for(lambda: self.right >= wanted)

    @contextlib.asynccontextmanager
    async def running(self, width: int) -> AsyncIterator["Load"]:
        """Keeps `width` requests in flight inside the context; every one of them has ended when it is left."""
        async with asyncio.TaskGroup() as group:
            for _ in range(width):
                group.create_task(self._run())
            try:
                yield self
            finally:
                self._stopping = True
