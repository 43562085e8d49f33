import asyncio
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from kvd.daemon.parts import Background
from kvd.errors import BadRequest, ErrorCode, InternalError
from tests.support.patience import MOMENT


async def _result(work):
    answered = asyncio.get_running_loop().create_future()
    Background(asyncio.get_running_loop())(work, answered.set_result)
    return await asyncio.wait_for(answered, MOMENT)


async def test_whoever_waits_for_background_work_hears_of_every_exception():
    def fails():
        raise ZeroDivisionError("an id of a user's")

    def refuses():
        raise BadRequest(ErrorCode.BAD_SPEC, "no spec")

    failed, refused = await _result(fails), await _result(refuses)
    assert isinstance(failed, InternalError)
    assert "ZeroDivisionError" in failed.text
    assert "user's" not in failed.text
    assert refused.code is ErrorCode.BAD_SPEC
    assert await _result(lambda: 7) == 7
    await asyncio.get_running_loop().shutdown_default_executor()


async def test_work_of_one_executor_keeps_that_of_another_waiting_for_nothing():
    loop, go_on = asyncio.get_running_loop(), threading.Event()
    slow = [loop.create_future() for _ in range(2)]
    with ThreadPoolExecutor(1) as threads:
        for each in slow:
            Background(loop, threads)(go_on.wait, each.set_result)
        assert await _result(lambda: 7) == 7
        go_on.set()
        assert await asyncio.wait_for(asyncio.gather(*slow), MOMENT) == [True, True]
    await loop.shutdown_default_executor()


async def test_work_for_which_no_thread_can_be_started_fails_and_is_not_done_later(monkeypatch):
    loop, done = asyncio.get_running_loop(), []
    with ThreadPoolExecutor(1) as threads:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", _refused)
            refused = loop.create_future()
            Background(loop, threads)(lambda: done.append("refused"), refused.set_result)
            assert (await asyncio.wait_for(refused, MOMENT)).code is ErrorCode.OVERLOADED
        later = loop.create_future()
        Background(loop, threads)(lambda: done.append("later"), later.set_result)
        await asyncio.wait_for(later, MOMENT)
    assert done == ["later"]


async def test_work_that_was_refused_is_not_kept(monkeypatch):
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(1) as threads, monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", _refused)
        asker = Asker()
        kept = weakref.ref(asker)
        answered = loop.create_future()
        Background(loop, threads)(asker.work, partial(asker.done, answered))
        await asyncio.wait_for(answered, MOMENT)
        await asyncio.sleep(0)
        del asker
        assert kept() is None


class Asker:
    def work(self):
        """Has `self` in what it is given."""

    def done(self, answered, result):
        answered.set_result(result)


def _refused(_thread):
    raise RuntimeError("can't start new thread")
