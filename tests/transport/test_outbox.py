import asyncio
import threading

from kvd.transport.interface import Event, Landed
from kvd.transport.on_loop import Outbox


def filled(outbox: Outbox, events: range) -> None:
    def fill() -> None:
        for number in events:
            outbox.put(Landed(number, 0.0))

    thread = threading.Thread(target=fill)
    thread.start()
    thread.join()


async def test_a_burst_arrives_in_order_and_wakes_the_loop_once() -> None:
    loop, heard, wakes = asyncio.get_running_loop(), [], []
    original = loop.call_soon_threadsafe
    loop.call_soon_threadsafe = lambda *args: (wakes.append(1), original(*args))  # type: ignore[assignment,method-assign]
    filled(Outbox(loop, heard.append), range(100))
    await asyncio.sleep(0)
    assert [event.read for event in heard] == list(range(100))
    assert len(wakes) == 1


async def test_a_handler_that_raises_holds_up_no_later_event() -> None:
    loop, heard, failures = asyncio.get_running_loop(), [], []
    loop.set_exception_handler(lambda _, context: failures.append(context["exception"]))

    def on_event(event: Event) -> None:
        heard.append(event)
        if len(heard) == 1:
            raise ValueError

    filled(Outbox(loop, on_event), range(3))
    for _ in range(3):
        await asyncio.sleep(0)
    assert len(heard) == 3
    assert [type(failure) for failure in failures] == [ValueError]


async def test_a_closed_outbox_delivers_nothing_more() -> None:
    heard: list[Event] = []
    outbox = Outbox(asyncio.get_running_loop(), heard.append)
    filled(outbox, range(3))
    outbox.close()
    filled(outbox, range(3))
    await asyncio.sleep(0)
    assert heard == []
