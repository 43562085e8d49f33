import os
import re
import select
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from kvd import limits
from kvd.daemon.processor import ProcessorWait
from kvd.doctor import Level
from kvd.doctor.daemon import check_daemon
from kvd.errors import ErrorCode
from kvd.metrics import Metrics
from kvd.net.inquiry import Inquiry
from kvd.protocol.status import ProcessorStatus, decode
from tests.simulator.virtual.loop import VirtualLoop
from tests.support.fleet import Fleet
from tests.support.patience import PATIENCE


class Kernel:
    """The files in which the kernel says how long threads waited."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.loop = VirtualLoop()
        self.metrics = Metrics(CollectorRegistry())

    def waits(self, thread: int, seconds: float) -> None:
        """The thread has waited for so long since it began."""
        (self.folder / str(thread)).mkdir(exist_ok=True)
        (self.folder / str(thread) / "schedstat").write_text(f"77 {round(seconds * 1e9)} 3\n")

    def passes(self, seconds: float) -> None:
        self.loop.run_until(self.loop.time() + seconds)

    def total(self, kind: str) -> float:
        return self.metrics.registry.get_sample_value("kvd_processor_wait_seconds_total", {"thread": kind}) or 0.0


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    return Kernel(tmp_path)


@pytest.fixture
def copying() -> Iterator[int]:
    """The number of a thread with the name of those that copy."""
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="kvd-copy")
    thread.start()
    assert thread.native_id is not None
    yield thread.native_id
    end.set()
    thread.join()


def test_waits_are_counted_by_kind_of_thread(kernel: Kernel, copying: int) -> None:
    kernel.waits(os.getpid(), 0.5)
    kernel.waits(copying, 0.25)
    kernel.waits(1, 0.125)
    wait = ProcessorWait(kernel.loop, kernel.metrics, kernel.folder)
    assert [kernel.total(kind) for kind in ("loop", "copy", "other")] == [0.5, 0.25, 0.125]
    assert wait.status() == ProcessorStatus(0.0, {"loop": 0.0, "copy": 0.0, "other": 0.0}), "that was before"
    kernel.waits(os.getpid(), 0.75)
    kernel.waits(2, 4.0)  # a new thread
    kernel.passes(1.0)
    assert wait.status() == ProcessorStatus(1.0, {"loop": 0.25, "copy": 0.0, "other": 4.0})
    assert [kernel.total(kind) for kind in ("loop", "copy", "other")] == [0.75, 0.25, 4.125]


def test_a_kernel_that_says_0_of_all_threads_does_not_count(kernel: Kernel) -> None:
    (kernel.folder / "1").mkdir()
    (kernel.folder / "1/schedstat").write_text("0 0 0\n")
    assert ProcessorWait(kernel.loop, kernel.metrics, kernel.folder).status().waited == {}


def test_the_threads_of_the_process_that_reads_from_other_hosts_count_as_the_transports(kernel: Kernel) -> None:
    waited = int(Path(f"/proc/{os.getpid()}/schedstat").read_text().split()[1]) * 1e-9
    process: list[int | None] = [os.getpid(), None]
    ProcessorWait(kernel.loop, kernel.metrics, kernel.folder, network=lambda: process[0])
    counted = kernel.total("transport")
    assert counted >= waited
    process.pop(0)
    kernel.passes(1.0)
    assert kernel.total("transport") == counted, "between two processes"


def test_another_thread_with_the_number_of_one_that_ended_takes_nothing_away(kernel: Kernel) -> None:
    kernel.waits(1, 5.0)
    ProcessorWait(kernel.loop, kernel.metrics, kernel.folder)
    kernel.waits(1, 0.5)
    kernel.passes(1.0)
    kernel.waits(1, 1.5)
    kernel.passes(1.0)
    assert kernel.total("other") == 6.0


def test_what_was_late_is_told_the_waits_of_its_own_time_and_only_long_ones(kernel: Kernel) -> None:
    kernel.waits(1, 0.0)
    wait = ProcessorWait(kernel.loop, kernel.metrics, kernel.folder)
    kernel.passes(2 * limits.STARVED_WINDOW_SECONDS)
    assert wait.status().seconds == limits.STARVED_WINDOW_SECONDS
    assert wait.starved(5.0) == ""
    kernel.waits(1, 2.0)
    kernel.passes(1.0)
    assert wait.starved(5.0) == "in the last 5 s threads waited for a processor: other 2.0 s (this daemon's)"
    assert wait.starved(limits.STARVED_WINDOW_SECONDS) == "", "two seconds of sixty are few"
    kernel.passes(5.0)
    assert wait.starved(5.0) == ""


def test_what_is_late_by_a_wait_that_has_just_ended_is_told_of_it(kernel: Kernel) -> None:
    kernel.waits(1, 0.0)
    wait = ProcessorWait(kernel.loop, kernel.metrics, kernel.folder)
    kernel.passes(5.25)
    kernel.waits(1, 0.5)
    kernel.passes(0.5)
    assert "other 0.5 s" in wait.starved(0.5)
    assert kernel.total("other") == 0.5
    kernel.passes(5.0)
    assert kernel.total("other") == 0.5, "it is counted once"


def test_a_kernel_that_does_not_count_leaves_nothing_to_say(kernel: Kernel) -> None:
    (kernel.folder / "1").mkdir()
    wait = ProcessorWait(kernel.loop, kernel.metrics, kernel.folder)
    kernel.passes(2.0)
    assert wait.status() == ProcessorStatus(2.0, {})
    assert not wait.status().starved
    assert wait.starved(1.0) == ""


@pytest.mark.real
def test_a_daemon_that_gets_no_processor_says_so_in_its_status_and_in_failures_by_a_deadline(fleet: Fleet) -> None:
    core = str(max(os.sched_getaffinity(0)))
    producer = fleet.daemon("p")
    daemon = fleet.daemon("d", within=("nice", "-n", "10", "taskset", "--cpu-list", core))
    ticket = fleet.worker(producer, "p").call("offer", name="o", ids=[1])
    worker, busy = fleet.worker(daemon, "d"), fleet.worker(daemon, "busy")
    # However rarely a busy machine lets `busy` ask, it asks for more of the core than the daemon gets.
    if (group := Path(f"/proc/{daemon.child.pid}/autogroup")).exists():
        group.write_text("10")
    with producer.paused(), spinning(4, core):
        worker.call("pull", name="r", ticket=ticket, ids=[2], timeout=10.0)
        worker.order("wait", timeout=PATIENCE)
        while not readable(worker.child.source):  # the loop has something to do, and wants a processor for it
            busy.call("status")
        (failed,) = worker.answer()
        assert failed["code"] == ErrorCode.DEADLINE
        # It looks about once a second.
        assert re.search(r"; in the last 1\d s threads waited for a processor: loop ", failed["text"])
        with Inquiry(str(daemon.socket)) as inquiry:
            status = decode(inquiry.status(PATIENCE))
        assert {"loop", "copy", "http"} <= status.processor.waited.keys()
        assert status.processor.starved
        assert status.worker_pids == {"d": worker.child.pid, "busy": busy.child.pid}
        (told,) = [finding for finding in check_daemon(str(daemon.socket), PATIENCE) if finding.subject == "processor"]
        assert told.level is Level.SLOW
        assert "kernel.sched_autogroup_enabled" in told.fix


@contextmanager
def spinning(count: int, core: str) -> Iterator[None]:
    """So many processes that compute on this core, in sessions of their own as daemons are."""
    command = ["taskset", "--cpu-list", core, sys.executable, "-c", "while True: pass"]
    spinners = [subprocess.Popen(command, start_new_session=True) for _ in range(count)]
    try:
        yield
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.wait()


def readable(descriptor: int) -> bool:
    return bool(select.select([descriptor], [], [], 0)[0])
