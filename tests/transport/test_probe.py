import asyncio
from collections.abc import AsyncIterator

import pytest

from kvd.transport.nixl import probe
from kvd.transport.nixl.probe import Probe
from tests.support.patience import MOMENT

pytestmark = pytest.mark.real


class Asking:
    def __init__(self) -> None:
        self.probe = Probe("tests.transport.wild_library")

    async def start(self, seconds: int) -> None:
        """Starts a process that gives each try so many."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(probe, "TRY_SECONDS", seconds)
            await self.probe._started()

    async def __call__(self, metadata: bytes, known: bytes = b"", agent: str = "peer#1") -> str:
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.probe(agent, known, metadata, answer.set_result)
        async with asyncio.timeout(MOMENT):
            return await answer

    @property
    def pid(self) -> int | None:
        return self.probe._process.pid if self.probe._process else None


@pytest.fixture
async def ask(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Asking]:
    for name in ("START_SECONDS", "TRY_SECONDS", "END_SECONDS"):
        monkeypatch.setattr(probe, name, int(MOMENT))
    asking = Asking()
    yield asking
    await asking.probe.close()
    assert asking.pid is None


async def test_metadata_that_loads_has_no_fault_and_one_process_tries_many(ask: Asking) -> None:
    assert await ask(b"good") == ""
    first = ask.pid
    assert await ask(b"good", known=b"before") == ""
    assert await ask(b"other memory", known=b"before") == ""  # what cannot be merged is loaded afresh
    assert ask.pid == first


@pytest.mark.parametrize(
    ("metadata", "fault"),
    [
        (b"abort", "ended the process that tried it first: signal SIGABRT"),
        (b"hang", "ended the process that tried it first: signal SIGALRM"),
        (b"greedy", "MemoryError"),
        (b"refused", "ValueError: NIXL_ERR_MISMATCH"),
        (b"endless answer", f"answer nonsense: {0xFFFFFFFF} bytes, the bound is"),
        (b"answer without text", "answer nonsense: 'utf-8' codec"),
    ],
)
async def test_metadata_that_does_harm_is_found_fault_with_and_the_next_is_tried_by_another_process(
    ask: Asking, metadata: bytes, fault: str
) -> None:
    if metadata == b"hang":
        await ask.start(seconds=1)
    else:
        assert await ask(b"good") == ""
    first = ask.pid
    harmful, good = await asyncio.gather(ask(metadata), ask(b"good"))
    assert fault in harmful
    assert good == ""
    assert ask.pid != first


async def test_metadata_that_does_harm_only_where_older_is_known_is_found_fault_with(ask: Asking) -> None:
    assert "SIGABRT" in await ask(b"abort", known=b"before")
    assert await ask(b"good") == ""


async def test_a_process_that_has_tried_many_is_replaced_as_it_keeps_a_connection_for_each(
    ask: Asking, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "MOST_TRIES", 2)
    assert await ask(b"good") == ""
    first = ask.pid
    assert await ask(b"good") == ""
    assert ask.pid != first
    assert await ask(b"good") == ""
    second = ask.pid
    assert second is not None
    assert await ask(b"good") == ""
    assert ask.pid != second


async def test_a_daemon_waits_for_one_try_of_another_however_many_that_one_asks_for(ask: Asking) -> None:
    came: list[str] = []

    async def asked(metadata: bytes, agent: str) -> None:
        await ask(metadata, agent=agent)
        came.append(agent)

    hostile = [asked(b"refused", f"hostile#{number}") for number in range(4)]
    await asyncio.gather(*hostile, asked(b"good", "honest#1"), asked(b"good", "other#1"))
    assert came == ["hostile#0", "honest#1", "other#1", "hostile#1", "hostile#2", "hostile#3"]
    # Its last one failed: it waits for all others.
    await asyncio.gather(asked(b"good", "other#2"), asked(b"good", "hostile#4"), asked(b"good", "honest#2"))
    assert came[6:] == ["other#2", "honest#2", "hostile#4"]


async def test_where_no_process_can_be_had_nothing_is_loaded() -> None:
    ask = Asking()
    ask.probe = Probe("tests.transport.no_such_library")
    assert "could not be tried" in await ask(b"good")
    await ask.probe.close()
