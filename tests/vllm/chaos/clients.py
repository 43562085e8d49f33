"""Clients that ask without a pause, and note how each request ended."""

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from tests.vllm.same_tokens import assert_same
from tests.vllm.testbed.client import Completion
from tests.vllm.testbed.http import HttpError

HANG_UP: Final = 0.1
"""Of the requests, those whose client goes away before the end."""

MIX_UP: Final = 0.05
"""Of the requests, those that come to the decode side with what the prefill side said of another prompt."""

HANG_UP_SECONDS: Final = 1.0
"""It does so by then: while its request is prefilled, queues, is loaded or is decoded."""

REFUSED_SECONDS: Final = 0.5
"""A client waits so long after an error: servers that are dead refuse at once."""

Ask = Callable[[list[int], int, str, bool], Awaitable[Completion]]
"""Completes a prompt with so many tokens, under a salt that no prefix cache knows; mixed up if the last is true."""


class Outcome(StrEnum):
    """How a request ended."""

    RIGHT = "right"
    FAILED = "failed"
    """With an error that the client was told."""
    REFUSED = "refused"
    """The same, where it was mixed up."""
    HUNG_UP = "hung up"
    LATE = "late"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Request:
    """One that has ended: `began` and `ended` are monotonic times."""

    outcome: Outcome
    began: float
    ended: float
    said: str = ""


class Clients:
    """`width` clients that ask for `known` prompts, whose completions they compare.

    A request is late when it has not ended `deadline` seconds after it began. `mix_up` is the share of those that are
    mixed up.
    """

    def __init__(
        self,
        ask: Ask,
        known: Sequence[tuple[list[int], Completion]],
        *,
        width: int,
        deadline: float,
        seed: int,
        mix_up: float = MIX_UP,
    ) -> None:
        self._ask = ask
        self._known = itertools.cycle(known)
        self._width = width
        self._deadline = deadline
        self._mix_up = mix_up
        self._random = random.Random(seed)  # noqa: S311  # no secret
        self._salts = itertools.count()
        self._stopping = False
        self.ended: list[Request] = []

    async def request(self, *, patience: float | None = None, mixed_up: bool = False) -> Request:
        """One request; its client hangs up after `patience` seconds, if that is given."""
        prompt, expected = next(self._known)
        began = time.monotonic()
        outcome, said = await self._outcome(prompt, expected, patience, mixed_up=mixed_up)
        ended = Request(outcome, began, time.monotonic(), said)
        self.ended.append(ended)
        return ended

    async def _outcome(
        self, prompt: list[int], expected: Completion, patience: float | None, *, mixed_up: bool
    ) -> tuple[Outcome, str]:
        try:
            async with asyncio.timeout(self._deadline if patience is None else patience):
                salt = f"chaos-{next(self._salts)}"
                completion = await self._ask(prompt, len(expected.tokens), salt, mixed_up)
            assert_same(completion, expected)
        except TimeoutError:
            return (Outcome.LATE, f"{len(prompt)} tokens") if patience is None else (Outcome.HUNG_UP, "")
        except HttpError as error:
            return Outcome.REFUSED if mixed_up else Outcome.FAILED, str(error)
        except AssertionError as error:
            return Outcome.WRONG, f"{len(prompt)} tokens: {error}"
        return Outcome.RIGHT, ""

    async def _run(self) -> None:
        while not self._stopping:
            hangs_up = self._random.random() < HANG_UP
            patience = self._random.uniform(0, HANG_UP_SECONDS) if hangs_up else None
            mixed_up = self._random.random() < self._mix_up
            if (await self.request(patience=patience, mixed_up=mixed_up)).outcome in {Outcome.FAILED, Outcome.REFUSED}:
                await asyncio.sleep(REFUSED_SECONDS)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """All clients ask inside of the context; all requests have ended when it is left."""
        clients = [asyncio.create_task(self._run()) for _ in range(self._width)]
        try:
            yield
        finally:
            self._stopping = True
            await asyncio.gather(*clients)
