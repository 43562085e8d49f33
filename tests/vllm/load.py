import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator

from tests.support.patience import PATIENCE
from tests.vllm.same_tokens import assert_same
from tests.vllm.testbed.client import Completion
from tests.vllm.testbed.http import HttpError
from tests.vllm.testbed.pair import KvdPair

_salts = itertools.count()


async def one(pair: KvdPair, prompt: list[int], expected: Completion, *, early: bool = False) -> HttpError | None:
    """The error in which a request ends; any tokens are the right ones. No cache has blocks of it: they all travel.

    Both servers get it at once if it is `early`.
    """
    ask = pair.complete_early if early else pair.complete
    try:
        async with asyncio.timeout(PATIENCE):
            completion = await ask(prompt, len(expected.tokens), cache_salt=f"salt-{next(_salts)}")
    except HttpError as error:
        return error
    assert_same(completion, expected)
    return None


class Load:
    """Requests without a pause, every other one early; counts how they ended."""

    def __init__(self, pair: KvdPair, expected: list[tuple[list[int], Completion]]) -> None:
        self._pair = pair
        self._expected = itertools.cycle(expected)
        self._early = itertools.cycle((False, True))
        self._stopping = False
        self._changed = asyncio.Condition()
        self.right = 0
        self.errors: list[HttpError] = []

    async def _run(self) -> None:
        while not self._stopping:
            error = await one(self._pair, *next(self._expected), early=next(self._early))
            if error is None:
                self.right += 1
            else:
                self.errors.append(error)
            async with self._changed:
                self._changed.notify_all()
            if error is not None:
                await asyncio.sleep(0.1)  # a server that is dead refuses at once

    async def answered(self, count: int) -> None:
        """Returns when `count` requests were answered."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.right >= count)

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
