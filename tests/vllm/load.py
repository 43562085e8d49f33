"""Load on a pair of vLLM's: no cache has blocks of a request, they all travel."""

import itertools
from typing import Any

from tests.serving import load
from tests.vllm.testbed.client import Completion
from tests.vllm.testbed.http import HttpError
from tests.vllm.testbed.pair import KvdPair

_salts = itertools.count()


def _salt() -> dict[str, Any]:
    return {"cache_salt": f"salt-{next(_salts)}"}


class _Early:
    """A pair whose requests go to both servers at once: all of them, or every other one."""

    def __init__(self, pair: KvdPair, *, every: int = 1) -> None:
        self._ask = itertools.cycle((pair.complete_early, pair.complete)[:every])

    async def complete(self, prompt: list[int], tokens: int, **more: Any) -> Completion:
        return await next(self._ask)(prompt, tokens, **more)


async def one(pair: KvdPair, prompt: list[int], expected: Completion, *, early: bool = False) -> HttpError | None:
    """As `load.one`; both servers get it at once if it is `early`."""
    return await load.one(_Early(pair) if early else pair, prompt, expected, _salt)


class Load(load.Load):
    """Every other request goes to both servers at once."""

    def __init__(self, pair: KvdPair, expected: list[tuple[list[int], Completion]]) -> None:
        super().__init__(_Early(pair, every=2), expected, _salt)
