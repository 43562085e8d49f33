"""The process of the NIXL transport is heard in time, has time for large pools, and is replaced while nobody reads."""

import asyncio
import threading
from types import SimpleNamespace

import pytest

from kvd import limits
from kvd.memory.mapping import Mapping
from kvd.memory.memfd import MemfdProvider
from kvd.transport.interface import Answered, Region, Registered
from kvd.transport.nixl import agent_loop, keeper
from kvd.transport.nixl.keeper import HUNG_PINGS
from kvd.transport.nixl.messages import Ping, Stop
from tests.transport import test_agent_loop, test_nixl_process
from tests.transport.descriptors import descriptors


@pytest.fixture
async def run(monkeypatch: pytest.MonkeyPatch) -> test_nixl_process.Run:
    return test_nixl_process.Run(monkeypatch)


def test_what_is_to_be_told_does_not_wait_for_the_end_of_a_long_row_of_small_posts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, now = test_agent_loop.Run(), 0.0
    monkeypatch.setattr(agent_loop, "time", SimpleNamespace(monotonic=lambda: now))
    run.nixl.immediately = "DONE"
    told: list[int] = []
    run.loop._flush = lambda: told.extend([len(run.nixl.transfers)] if Answered(1) in run.events else [])

    def post() -> None:
        nonlocal now
        now += 0.0025
        if len(run.nixl.transfers) == 5:
            run.tell("ping", 1)

    run.nixl.on_transfer = post
    run.read(1, descriptors((2 * i, 2 * i, 1) for i in range(20 * limits.SLICE_DESCRIPTORS)))
    run.go()
    assert len(run.nixl.transfers) == 20
    assert told[0] == 7, "with the post after the command"


async def test_a_process_that_registers_a_large_pool_has_time_for_it_and_the_watchdog_hears_that_it_lives(
    run: test_nixl_process.Run,
) -> None:
    size = 500 * limits.GIB
    run.transport.register(1, Region(1 << 30, size, 0, length=size))
    for number in range(3 * HUNG_PINGS):
        run.transport.ping(number)
    assert not run.child.fault
    assert run.taken() == [Answered(number) for number in range(3 * HUNG_PINGS)]
    assert not [command for command in run.child.commands if isinstance(command, Ping)]
    run.child.says([Registered(1, b"at last")])
    for number in range(HUNG_PINGS + 1):
        run.transport.ping(number)
    assert run.child.fault == f"it did not answer {HUNG_PINGS} pings"


async def test_a_process_that_does_not_come_to_an_end_with_a_pool_is_ended(run: test_nixl_process.Run) -> None:
    run.transport.register(1, Region(1 << 30, limits.GIB, 0, length=limits.GIB))
    while not run.child.fault:
        run.transport.ping(1)
    patience = HUNG_PINGS + limits.GIB // keeper.REGISTERED_PER_PING
    assert run.child.fault == f"it did not answer {patience} pings"
    assert run.taken() == [Answered(1)] * patience


@pytest.mark.parametrize(("bound", "value"), [("MAX_BLANKED", 3), ("MAX_BLANKED_BYTES", 6 * limits.MIB)])
def test_a_ping_is_answered_with_whether_pools_that_have_ended_have_many_addresses(
    bound: str, value: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_loop, bound, value)
    run, pool = test_agent_loop.Run(), MemfdProvider().allocate("pool", 4096)
    for number in range(3):
        run.loop.ping(number)
        run.loop.register(number, pool.base, pool.size, Mapping(pool.descriptor, pool.length), False)
        run.loop.deregister(number)
    run.loop.ping(3)
    answers = [event for event in run.events if isinstance(event, Answered)]
    assert [answer.few_addresses for answer in answers] == [False, False, False, True]
    pool.close()


async def test_a_process_that_pools_which_ended_left_few_addresses_is_replaced_however_young_unless_somebody_reads(
    run: test_nixl_process.Run,
) -> None:
    run.transport.expect_readers(True)
    run.transport.ping(1)
    run.child.says([Answered(1, few_addresses=True)])
    assert not run.child.fault
    run.transport.expect_readers(False)
    run.transport.ping(2)
    run.child.says([Answered(2, few_addresses=True)])
    assert run.child.fault == "few addresses are free: pools that have ended have the others"


async def test_a_process_is_talked_to_on_the_loop_alone_also_when_a_thread_stops_it(
    run: test_nixl_process.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, waited = [], []
    for name in ("send", "close"):
        call = getattr(run.child, name)
        monkeypatch.setattr(run.child, name, lambda *args, c=call: threads.append(threading.get_ident()) or c(*args))
    monkeypatch.setattr(run.child, "end_within", waited.append, raising=False)
    await asyncio.to_thread(run.transport.stop)
    assert run.child.commands == [Stop(keeper.STOP_SECONDS)]
    assert waited == [keeper.STOP_SECONDS]
    assert threads == [threading.get_ident()] * 2
