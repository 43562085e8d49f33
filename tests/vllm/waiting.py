import asyncio
from collections.abc import Awaitable, Callable

from tests.support.patience import PATIENCE


async def until(condition: Callable[[], Awaitable[bool]], seconds: float = PATIENCE, every: float = 0.05) -> None:
    """Returns when `condition` holds; TimeoutError after `seconds`. For what another process only shows when asked."""
    async with asyncio.timeout(seconds):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(every)
