import asyncio
from collections.abc import Awaitable, Callable


async def until(condition: Callable[[], Awaitable[bool]], seconds: float, every: float = 0.05) -> None:
    """Returns when `condition` holds; TimeoutError after `seconds`. For what another process only shows when asked."""
    async with asyncio.timeout(seconds):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(every)
