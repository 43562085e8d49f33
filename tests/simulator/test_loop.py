import pytest

from tests.simulator.virtual.loop import Process, VirtualLoop


@pytest.fixture
def loop():
    return VirtualLoop()


def test_callbacks_run_in_the_order_they_were_asked_for(loop):
    ran = []
    loop.call_later(0.1, ran.append, "later")
    loop.call_later(0.1, ran.append, "later still")
    loop.call_soon(ran.append, "soon")
    loop.call_soon(ran.append, "next")
    loop.run_until(1.0)
    assert ran == ["soon", "next", "later", "later still"]
    assert loop.time() == 1.0


def test_time_jumps_to_what_comes_next(loop):
    times = []
    loop.call_later(5.0, lambda: times.append(loop.time()))
    loop.call_later(2.5, lambda: times.append(loop.time()))
    loop.run_until(10.0)
    assert times == [2.5, 5.0]


def test_what_is_due_after_the_end_waits(loop):
    ran = []
    loop.call_later(2.0, ran.append, "x")
    loop.run_until(1.0)
    assert not ran
    loop.run_until(2.0)
    assert ran == ["x"]


def test_a_cancelled_timer_does_not_run(loop):
    ran = []
    loop.call_later(1.0, ran.append, "x").cancel()
    loop.run_until(2.0)
    assert not ran


def test_nothing_of_a_killed_process_runs(loop):
    process, ran = Process(loop, "p"), []
    process.call_soon(ran.append, "soon")
    process.call_later(1.0, ran.append, "later")
    process.kill()
    process.call_soon(ran.append, "after")
    loop.run_until(2.0)
    assert not ran


def test_a_stopped_process_does_everything_when_it_goes_on(loop):
    process, ran = Process(loop, "p"), []
    process.call_later(1.0, ran.append, "first")
    process.call_later(2.0, ran.append, "second")
    process.pause()
    loop.run_until(3.0)
    assert not ran
    process.resume()
    loop.run_until(3.0)
    assert ran == ["first", "second"]


def test_a_process_that_stood_still_runs_its_timers_before_it_reads(loop):
    process, ran = Process(loop, "p"), []
    process.pause()
    loop.call_later(1.0, process.call_soon, ran.append, "read")
    process.call_later(2.0, ran.append, "timer")
    loop.run_until(3.0)
    process.resume(timers_first=True)
    loop.run_until(3.0)
    assert ran == ["timer", "read"]


def test_a_loop_that_feeds_itself_is_stopped(loop):
    def again():
        loop.call_soon(again)

    loop.call_soon(again)
    with pytest.raises(RuntimeError, match="again"):
        loop.run_until(1.0)
