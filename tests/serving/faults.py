"""Faults at random moments: processes are killed and started again, or stand still."""

import asyncio
import os
import random
import signal
from collections.abc import Mapping

from tests.vllm.testbed.service import Service, start_all

SECONDS = 100.0

_LONGEST_STILL = 3.0
"""Longer than requests take on a quiet machine, shorter than any of the processes is waited for."""


def seed() -> int:
    """A new one, or `KVD_TEST_SEED`."""
    return int(os.environ.get("KVD_TEST_SEED") or random.SystemRandom().randrange(1 << 31))


async def random_faults(victims: Mapping[str, Service], chosen: int, seconds: float = SECONDS) -> str:
    """One fault after another until so many seconds are over, and what they were; all processes run in the end."""
    source = random.Random(chosen)  # noqa: S311 - no secret
    loop = asyncio.get_running_loop()
    until, faults = loop.time() + seconds, []
    while loop.time() < until:
        name = source.choice(sorted(victims))
        if source.random() < 0.5:
            faults.append(f"{name} killed")
            victims[name].kill()
            await asyncio.sleep(source.uniform(0, 1))
            await start_all([victims[name]])
        else:
            faults.append(f"{name} stopped")
            victims[name].signal_group(signal.SIGSTOP)
            await asyncio.sleep(source.uniform(0.1, _LONGEST_STILL))
            victims[name].signal_group(signal.SIGCONT)
        await asyncio.sleep(source.uniform(0, 2))
    return f"seed {chosen}: {', '.join(faults)}"
