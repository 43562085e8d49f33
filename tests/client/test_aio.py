import asyncio
import math
import select
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from kvd.client import AsyncWorker, Blocks, Disconnected, Done, Event, Failed, OfferRefused, Reattached, Released
from kvd.errors import BadRequest, ErrorCode, Unavailable
from kvd.protocol import worker as wire
from kvd.protocol.status import Totals
from tests.client.conftest import ScriptedDaemon, Spec
from tests.support.patience import MOMENT
from tests.support.statuses import status_report

BLOCKS = (Blocks(group=0, first=0, ids=[3, 1, 2]),)

Script = Callable[[Callable[[], object]], "asyncio.Future[object]"]


@pytest.fixture
async def worker(daemon: ScriptedDaemon) -> AsyncIterator[AsyncWorker]:
    async with await AsyncWorker.attach(daemon.path, name="decode-0", spec=Spec(), timeout=MOMENT) as worker:
        yield worker


@pytest.fixture
async def script() -> AsyncIterator[Script]:
    """Runs what the daemon has to do in another thread, while the worker's loop goes on."""
    with ThreadPoolExecutor(1) as executor:
        yield lambda work: asyncio.get_running_loop().run_in_executor(executor, work)


async def wait_for(worker: AsyncWorker, count: int) -> list[Event]:
    """Exactly the next `count` events."""
    events: list[Event] = []
    while len(events) < count:
        arrived = await worker.wait(MOMENT)
        assert arrived, f"only {events} arrived"
        events += arrived
    assert len(events) == count, events
    return events


async def test_the_pool_is_mapped_and_facts_are_known(daemon: ScriptedDaemon, worker: AsyncWorker) -> None:
    worker.pool[:4] = b"work"
    assert (worker.daemon, worker.incarnation, worker.kept, worker.connected) == ("daemon-0", 1, False, True)


async def test_an_offer_a_status_and_a_pull_at_once_get_their_own_answers(
    daemon: ScriptedDaemon, worker: AsyncWorker, script: Script
) -> None:
    report = msgspec.json.encode(status_report(Totals(1.0, 2, 3, {}, 4, 5, {})))

    def answer() -> None:
        for _ in range(3):
            match daemon.inbox.get(timeout=MOMENT):
                case wire.Offer() as offer:
                    daemon.send(wire.Offered(offer.call, "the ticket"))
                case wire.StatusRequest() as status:
                    daemon.send(wire.Status(status.call, report))
                case wire.Pull() as pull:
                    daemon.notify(1, wire.Done(pull.request))

    answered = script(answer)
    worker.pull("pull-1", "a ticket", blocks=BLOCKS, timeout=30)
    ticket, status = await asyncio.gather(
        worker.offer("offer-1", tokens=10, blocks=BLOCKS, ttl=60), worker.status(timeout=MOMENT)
    )
    assert (ticket, status) == ("the ticket", msgspec.json.decode(report))
    assert await wait_for(worker, 1) == [Done("pull-1")]
    await answered


async def test_an_offer_that_grows_is_opened(daemon: ScriptedDaemon, worker: AsyncWorker, script: Script) -> None:
    answered = script(lambda: daemon.send(wire.Offered(daemon.expect(wire.Offer).call, "the ticket")))
    assert await worker.open_offer("offer-1", ttl=60) == "the ticket"
    await answered
    worker.extend_offer("offer-1", tokens=10, blocks=BLOCKS)
    worker.close_offer("offer-1", tokens=12)
    sent = [(extend.tokens, extend.closes) for extend in (daemon.expect(wire.Extend), daemon.expect(wire.Extend))]
    assert sent == [(10, False), (12, True)]


async def test_a_refused_offer_is_raised(daemon: ScriptedDaemon, worker: AsyncWorker, script: Script) -> None:
    answered = script(lambda: daemon.send(wire.Error(daemon.expect(wire.Offer).call, "bad_blocks", "not yours")))
    with pytest.raises(BadRequest, match="not yours") as caught:
        await worker.offer("offer-1", tokens=10, blocks=BLOCKS, ttl=60)
    assert caught.value.code is ErrorCode.BAD_BLOCKS
    await answered


async def test_an_offer_without_an_answer_is_withdrawn(
    daemon: ScriptedDaemon, worker: AsyncWorker, script: Script
) -> None:
    with pytest.raises(Unavailable, match="no answer to the offer 'offer-1'"):
        await worker.offer("offer-1", tokens=10, blocks=BLOCKS, ttl=60, timeout=0.01)
    worker.poll()
    await script(lambda: (daemon.expect(wire.Offer), daemon.expect(wire.Cancel)))
    await script(lambda: daemon.notify(1, wire.Released("offer-1", "withdrawn")))
    assert await wait_for(worker, 1) == [Released("offer-1", "withdrawn")]


async def test_a_request_of_one_task_leaves_another_what_had_just_arrived(
    daemon: ScriptedDaemon, worker: AsyncWorker, script: Script
) -> None:
    worker.pull("pull-1", "a ticket", blocks=BLOCKS, timeout=2 * MOMENT)
    await script(lambda: daemon.expect(wire.Pull))
    waiting = asyncio.create_task(worker.wait(2 * MOMENT))  # at its end it would look in any case
    await asyncio.sleep(0)
    daemon.notify(1, wire.Done("pull-1"))
    select.select(worker._driver._watched, (), (), MOMENT)  # it has arrived, and the loop has not looked yet
    worker.pull("pull-2", "a ticket", blocks=BLOCKS, timeout=2 * MOMENT)
    async with asyncio.timeout(MOMENT):
        assert await waiting == [Done("pull-1")]


@pytest.mark.parametrize("by", ["poll", "wait"])
@pytest.mark.parametrize("asked", ["offer", "status", "detach"])
async def test_what_one_task_reads_wakes_another_that_it_is_for(
    daemon: ScriptedDaemon, worker: AsyncWorker, asked: str, by: str
) -> None:
    timeout = 2 * MOMENT  # at its end it would look in any case
    request = {
        "offer": lambda: worker.offer("o", tokens=1, blocks=BLOCKS, ttl=60.0, timeout=timeout),
        "status": lambda: worker.status(timeout),
        "detach": lambda: worker.detach(timeout),
    }
    with daemon.held():
        asking = asyncio.create_task(request[asked]())
        async with asyncio.timeout(MOMENT):
            # Until the loop has nothing more to do.
            while not worker._waiters or worker._timer or any(one.done() for one in worker._waiters):  # noqa: ASYNC110
                await asyncio.sleep(0)
    if asked == "offer":
        daemon.send(wire.Offered(daemon.expect(wire.Offer).call, "the ticket"))
    elif asked == "status":
        report = msgspec.json.encode(status_report(Totals(1.0, 2, 3, {}, 4, 5, {})))
        daemon.send(wire.Status(daemon.expect(wire.StatusRequest).call, report))
    driver = worker._driver
    while not (driver.core.events._awaited.get("o") or driver.core._reports or driver.detached):
        select.select(worker._driver._watched, (), (), MOMENT)  # meanwhile the loop does not look
        assert (worker.poll() if by == "poll" else await worker.wait(0)) == []
    async with asyncio.timeout(MOMENT):
        await asking


async def test_waiting_ends_with_its_time(worker: AsyncWorker) -> None:
    assert await worker.wait(0.01) == []
    with pytest.raises(Unavailable, match="no status within"):
        await worker.status(timeout=0.01)


async def test_a_time_that_is_no_number_is_refused(daemon: ScriptedDaemon, worker: AsyncWorker) -> None:
    for attempt in (
        lambda: worker.wait(math.nan),
        lambda: worker.status(timeout=math.nan),
        lambda: worker.offer("offer-1", tokens=1, blocks=[Blocks(0, 0, [1])], ttl=60.0, timeout=math.nan),
        lambda: worker.detach(timeout=math.nan),
        lambda: AsyncWorker.attach(daemon.path, name="decode-1", spec=Spec(), timeout=math.nan),
    ):
        with pytest.raises(BadRequest, match="not a number"):
            await attempt()
    assert daemon.inbox.empty()


async def test_of_a_status_that_is_given_up_nothing_is_kept(worker: AsyncWorker) -> None:
    waiting = asyncio.create_task(worker.status())
    await asyncio.sleep(0)
    assert worker._driver.core._calls._waiting
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not worker._driver.core._calls._waiting


async def test_a_refusal_is_raised_as_the_error_it_is(daemon: ScriptedDaemon) -> None:
    daemon.refusal = BadRequest(ErrorCode.BAD_SPEC, "two views overlap")
    with pytest.raises(BadRequest, match="two views overlap"):
        await AsyncWorker.attach(daemon.path, name="decode-0", spec=Spec())


async def test_an_attach_that_is_cancelled_leaves_nothing(daemon: ScriptedDaemon) -> None:
    daemon.silent = True
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await AsyncWorker.attach(daemon.path, name="decode-0", spec=Spec())


async def test_a_silent_daemon_does_not_keep_a_pull_open(daemon: ScriptedDaemon, worker: AsyncWorker) -> None:
    worker.pull("pull-1", "a ticket", blocks=BLOCKS, timeout=0.01)
    (failed,) = await wait_for(worker, 1)
    assert isinstance(failed, Failed)
    assert (failed.code, failed.quarantined) == (ErrorCode.DEADLINE, True)


async def test_the_worker_attaches_again_while_nobody_polls(
    daemon: ScriptedDaemon, worker: AsyncWorker, script: Script
) -> None:
    worker.pull("pull-1", "a ticket", blocks=BLOCKS, timeout=30)
    await script(lambda: daemon.expect(wire.Pull))
    for _ in range(3):
        sessions = len(daemon.sessions)
        await script(daemon.hang_up)
        async with asyncio.timeout(MOMENT):
            while len(daemon.sessions) == sessions or not worker.connected:  # noqa: ASYNC110 - it has no event for that
                await asyncio.sleep(0)
    events = worker.poll()
    assert [type(event) for event in events] == [Disconnected, Reattached] * 3
    worker.pull("pull-2", "a ticket", blocks=BLOCKS, timeout=30)
    await script(lambda: daemon.inbox.get(timeout=MOMENT))

    def tell() -> None:
        while not daemon.try_notify(1, wire.Done("pull-1"), wire.Done("pull-2")):
            pass

    await script(tell)
    assert await wait_for(worker, 2) == [Done("pull-1"), Done("pull-2")]


async def test_a_new_daemon_is_found_and_what_the_old_one_did_ends(
    daemon: ScriptedDaemon, worker: AsyncWorker, script: Script
) -> None:
    worker.pull("pull-1", "a ticket", blocks=BLOCKS, timeout=30)
    worker.offer_nowait("offer-1", tokens=10, blocks=BLOCKS, ttl=60)
    await script(daemon.stop)
    lost, failed, refused = await wait_for(worker, 3)
    assert isinstance(lost, Disconnected)
    successor = ScriptedDaemon(daemon.path, incarnation=2)
    [back] = await wait_for(worker, 1)
    assert isinstance(failed, Failed)
    assert not failed.quarantined
    assert isinstance(refused, OfferRefused)
    assert back == Reattached(2, same=False)
    await script(successor.stop)


async def test_detaching_gives_the_pool_back_and_closes(daemon: ScriptedDaemon, worker: AsyncWorker) -> None:
    await worker.detach()
    with pytest.raises(BadRequest, match="the worker is closed"):
        worker.cancel("pull-1")


async def test_detaching_closes_also_where_the_daemon_cannot_be_reached(
    daemon: ScriptedDaemon, worker: AsyncWorker, script: Script
) -> None:
    await script(daemon.stop)
    await wait_for(worker, 1)
    with pytest.raises(Unavailable, match="the daemon cannot be reached, so it cannot take the pool back"):
        await worker.detach()
    with pytest.raises(BadRequest, match="the worker is closed"):
        worker.cancel("pull-1")


async def test_closing_ends_whoever_waits(worker: AsyncWorker) -> None:
    waiting = asyncio.create_task(worker.wait(MOMENT))
    await asyncio.sleep(0)
    worker.close()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def answered(daemon: ScriptedDaemon, worker: AsyncWorker, script: Script, offer: str) -> str:
    """The ticket of an offer that the daemon accepts at once."""
    offering = asyncio.create_task(worker.offer(offer, tokens=1, blocks=BLOCKS, ttl=60.0, timeout=MOMENT))
    await script(lambda: daemon.send(wire.Offered(daemon.expect(wire.Offer).call, "the ticket")))
    return await offering


async def test_answers_to_offers_are_not_taken_by_tasks_that_wait_for_events(
    daemon: ScriptedDaemon, worker: AsyncWorker, script: Script
) -> None:
    waiting = asyncio.create_task(worker.wait(3 * MOMENT))
    for number in range(20):  # who of those that wait is first woken is chance
        assert await answered(daemon, worker, script, f"offer-{number}") == "the ticket"
    daemon.notify(1, wire.Released("offer-3", "read"))
    async with asyncio.timeout(MOMENT):
        assert await waiting == [Released("offer-3", "read")]


async def test_what_follows_an_answer_at_once_wakes_those_who_wait_for_events(
    daemon: ScriptedDaemon, worker: AsyncWorker, script: Script
) -> None:
    waiting = asyncio.create_task(worker.wait(3 * MOMENT))
    offering = asyncio.create_task(worker.offer("o", tokens=1, blocks=BLOCKS, ttl=60.0, timeout=MOMENT))

    def answer() -> None:
        released = wire.Notifications(1, (wire.Released("o", "expired"),))
        daemon.send(wire.Offered(daemon.expect(wire.Offer).call, "the ticket"), released)

    await script(answer)
    async with asyncio.timeout(MOMENT):
        assert await offering == "the ticket"
        assert await waiting == [Released("o", "expired")]


@pytest.mark.parametrize("ends", ["by its time", "cancelled"])
async def test_an_offer_without_an_answer_is_withdrawn_at_once_also_while_nobody_polls(
    daemon: ScriptedDaemon, worker: AsyncWorker, script: Script, ends: str
) -> None:
    waiting = asyncio.create_task(worker.wait(3 * MOMENT))
    timeout = 0.01 if ends == "by its time" else MOMENT
    offering = asyncio.create_task(worker.offer("o", tokens=1, blocks=BLOCKS, ttl=3600.0, timeout=timeout))
    await script(lambda: daemon.expect(wire.Offer))
    if ends == "cancelled":
        offering.cancel()
    with pytest.raises(asyncio.CancelledError if ends == "cancelled" else Unavailable):
        await offering
    await script(lambda: daemon.expect(wire.Cancel))
    with pytest.raises(BadRequest, match="open pull or offer"):
        await worker.offer("o", tokens=1, blocks=BLOCKS, ttl=3600.0, timeout=MOMENT)
    daemon.notify(1, wire.Released("o", "withdrawn"))
    async with asyncio.timeout(MOMENT):
        assert await waiting == [Released("o", "withdrawn")]
    assert await answered(daemon, worker, script, "o") == "the ticket"


async def test_the_end_of_an_offer_is_not_taken_for_the_answer_to_the_next_of_its_name(
    daemon: ScriptedDaemon, worker: AsyncWorker, script: Script
) -> None:
    await answered(daemon, worker, script, "o")
    daemon.notify(1, wire.Released("o", "expired"))
    async with asyncio.timeout(MOMENT):
        while "o" in worker._driver.core._offers:  # read in the background, and not told yet  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    with pytest.raises(BadRequest, match="more to tell"):
        await worker.offer("o", tokens=1, blocks=BLOCKS, ttl=60.0, timeout=MOMENT)
    assert worker.poll() == [Released("o", "expired")]
    assert await answered(daemon, worker, script, "o") == "the ticket"
