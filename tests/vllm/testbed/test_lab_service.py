"""What a service says of, and does to, all that its process has started."""

import asyncio
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.support.fleet import until
from tests.vllm.testbed.service import Service

pytestmark = pytest.mark.real

PARENT_OF_A_SPINNER = """
import subprocess, sys
print("up", flush=True)
subprocess.run([sys.executable, "-c", "while True: pass"])
"""


class Spinning(Service):
    """A process that sleeps, and one that it started, which spins."""

    def command(self) -> Sequence[str]:
        return [sys.executable, "-c", PARENT_OF_A_SPINNER]

    async def is_up(self) -> bool:
        return "up" in self.log.read_text() and len(self.processes()) == 2

    def processes(self) -> list[int]:
        return list(self._members())


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Spinning]:
    made = Spinning("spinning", tmp_path)
    made.start()
    try:
        asyncio.run(made.ready())
        yield made
    finally:
        made.signal_group(9)
        made.stop()


def test_processor_time_is_that_of_all_that_a_service_started(service: Spinning) -> None:
    before = service.processor_seconds()
    for _ in until("its child has computed"):
        if service.processor_seconds() > before + 0.2:
            break


def test_a_service_keeps_to_cores_with_all_that_it_started(service: Spinning) -> None:
    anywhere = os.sched_getaffinity(0)
    for cores in ({max(anywhere)}, anywhere):
        service.keep_to(cores)
        assert [os.sched_getaffinity(pid) for pid in service.processes()] == [cores, cores]
