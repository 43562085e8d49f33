import array
import os
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvd.daemon.systemd import DescriptorStore, Notifier, received_descriptors
from kvd.errors import BadRequest, ErrorCode, Unavailable
from tests.simulator.virtual.loop import VirtualLoop
from tests.support.descriptors import no_descriptors_left
from tests.support.patience import PATIENCE


class Systemd:
    """The other end of the notification socket: remembers texts, keeps descriptors by name."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.kept: dict[str, int] = {}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.path)
        self._socket.setblocking(False)

    def read(self, *, keep: bool = True) -> list[str]:
        """What has arrived; with `keep` the descriptors are kept and closed as systemd does."""
        texts = []
        while True:
            try:
                data, ancillary, _flags, _ = self._socket.recvmsg(4096, socket.CMSG_SPACE(16))
            except BlockingIOError:
                return texts
            fields = dict(line.split("=", 1) for line in data.decode().splitlines())
            for _level, _kind, content in ancillary:
                self.kept[fields["FDNAME"]] = array.array("i", content)[0]
            if keep and "FDSTOREREMOVE" in fields:
                os.close(self.kept.pop(fields["FDNAME"]))
            texts.append(data.decode())

    def close(self) -> None:
        self.read()
        self._socket.close()
        for descriptor in self.kept.values():
            os.close(descriptor)


_OPEN: list[Notifier] = []


def telling(path: str) -> Notifier:
    _OPEN.append(Notifier({"NOTIFY_SOCKET": path}))
    return _OPEN[-1]


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while _OPEN:
        _OPEN.pop().close()


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[Systemd]:
    end = Systemd(tmp_path / "notify")
    yield end
    end.close()


def memfd(content: bytes) -> int:
    descriptor = os.memfd_create("pool")
    os.write(descriptor, content)
    return descriptor


def handed_over(systemd: Systemd) -> dict[str, int]:
    systemd.read()
    return {name: os.dup(descriptor) for name, descriptor in systemd.kept.items()}


def test_readiness_status_watchdog_and_end_are_told_as_systemd_reads_them(systemd: Systemd) -> None:
    notifier = telling(systemd.path)
    notifier.ready()
    notifier.status("serving\nFDNAME=x")
    notifier.status("serving\nFDNAME=x")
    notifier.feed()
    notifier.stopping(1.5)
    assert systemd.read() == [
        "READY=1",
        "STATUS=serving?FDNAME=x",  # one assignment, whatever a text of others has in it
        "WATCHDOG=1",
        "STOPPING=1\nEXTEND_TIMEOUT_USEC=1500000",
    ]


def test_the_watchdog_is_fed_and_pools_are_kept_where_no_descriptor_is_left(systemd: Systemd) -> None:
    notifier, pool = telling(systemd.path), memfd(b"kept")
    with no_descriptors_left():
        notifier.feed()
        notifier.store("a", pool)
    assert systemd.read() == ["WATCHDOG=1", "FDSTORE=1\nFDPOLL=0\nFDNAME=a"]
    assert os.pread(systemd.kept["a"], 4, 0) == b"kept"
    os.close(pool)


def test_a_pool_that_cannot_be_kept_for_a_manager_that_does_not_listen_stops_nothing(tmp_path: Path) -> None:
    notifier, pool = telling(str(tmp_path / "notify")), memfd(b"kept")
    with no_descriptors_left():
        notifier.store("a", pool)
    systemd = Systemd(tmp_path / "notify")
    notifier.feed()
    assert systemd.read() == ["WATCHDOG=1"]
    systemd.close()
    os.close(pool)


def test_nothing_is_said_where_nobody_listens() -> None:
    notifier = Notifier({})
    notifier.ready()


def test_a_service_manager_that_does_not_read_does_not_block_the_daemon(systemd: Systemd) -> None:
    notifier = telling(systemd.path)
    for _ in range(10_000):
        notifier.feed()


def test_what_the_socket_refuses_is_said_again_in_order_with_the_next_answer_of_everything(tmp_path: Path) -> None:
    notifier = telling(str(tmp_path / "notify"))
    pool = memfd(b"kept")
    notifier.ready()
    notifier.store("a", pool)
    notifier.store("b", pool)
    notifier.unstore("a")
    notifier.status("serving")
    os.close(pool)
    notifier.feed()
    systemd = Systemd(tmp_path / "notify")  # systemd was reloading
    try:
        notifier.feed()
        notifier.status("serving")
        texts = systemd.read()
        assert [text.partition("\n")[0] for text in texts] == [
            "READY=1",
            "FDSTORE=1",
            "FDSTORE=1",
            "FDSTOREREMOVE=1",
            "WATCHDOG=1",
            "STATUS=serving",
        ]
        assert os.pread(systemd.kept["b"], 4, 0) == b"kept"
        assert set(systemd.kept) == {"b"}
        notifier.feed()
        assert systemd.read() == ["WATCHDOG=1"]
    finally:
        systemd.close()


def test_a_stored_pool_is_not_polled_as_a_gpus_memory_is_a_device_with_news(systemd: Systemd) -> None:
    pool = memfd(b"kept")
    telling(systemd.path).store("a", pool)
    os.close(pool)
    assert systemd.read() == ["FDSTORE=1\nFDPOLL=0\nFDNAME=a"]


def test_a_socket_that_is_full_takes_the_rest_later(systemd: Systemd) -> None:
    notifier = telling(systemd.path)
    kernel_keeps = int(Path("/proc/sys/net/unix/max_dgram_qlen").read_text())
    names = [f"pool-{number}" for number in range(3 * kernel_keeps)]
    for name in names:
        notifier.unstore(name)
    taken: list[str] = []
    for _ in range(5):
        taken += [text.rpartition("=")[2] for text in systemd.read(keep=False) if text.startswith("FDSTOREREMOVE")]
        notifier.feed()
    assert taken == names


def test_a_stored_pool_comes_back_to_the_same_worker_only(systemd: Systemd) -> None:
    pool = memfd(b"kept")
    DescriptorStore(telling(systemd.path), {}).keep("engine:0/@a", 1000, b"spec", pool)
    os.close(pool)
    successor = DescriptorStore(telling(systemd.path), handed_over(systemd))
    assert successor.take("engine:0/@b", 1000, b"spec", 0) == -1
    assert successor.take("engine:0/@a", 1001, b"spec", 0) == -1
    taken = successor.take("engine:0/@a", 1000, b"spec", 0)
    assert os.pread(taken, 4, 0) == b"kept"
    successor.keep("engine:0/@a", 1000, b"spec", taken)
    os.close(taken)
    assert successor.take("engine:0/@a", 1000, b"spec", 0) == -1


@pytest.mark.parametrize("own", [False, True])
def test_a_pool_that_a_worker_has_again_stays_stored_when_those_that_nobody_came_for_go(
    systemd: Systemd, *, own: bool
) -> None:
    """Whether the worker brought its `own` descriptor, as a process that outlived the daemon does, or takes it here."""
    had, lost = memfd(b"had"), memfd(b"lost")
    first = DescriptorStore(telling(systemd.path), {})
    first.keep("w", 0, b"spec", had)
    first.keep("gone", 0, b"spec", lost)
    os.close(lost)
    second = DescriptorStore(telling(systemd.path), handed_over(systemd))
    brought = had if own else second.take("w", 0, b"spec", 0)
    second.keep("w", 0, b"spec", brought)
    assert second.unclaimed == 1
    second.drop_unclaimed()
    systemd.read()
    (kept,) = systemd.kept.values()
    assert os.pread(kept, 3, 0) == b"had"
    for descriptor in {had, brought}:
        os.close(descriptor)


def test_a_pool_of_another_file_takes_the_place_of_the_one_that_was_stored(systemd: Systemd) -> None:
    """systemd keeps all that is stored under one name, and the next daemon could not tell which was the last."""
    old, new = memfd(b"old"), memfd(b"new")
    DescriptorStore(telling(systemd.path), {}).keep("w", 0, b"spec", old)
    DescriptorStore(telling(systemd.path), handed_over(systemd)).keep("w", 0, b"spec", new)
    assert [text.partition("=")[0] for text in systemd.read()] == ["FDSTOREREMOVE", "FDSTORE"]
    (kept,) = systemd.kept.values()
    assert os.pread(kept, 3, 0) == b"new"
    os.close(old)
    os.close(new)


def test_a_worker_that_brings_another_layout_gives_its_old_pool_up(systemd: Systemd) -> None:
    old, new = memfd(b"old"), memfd(b"new")
    DescriptorStore(telling(systemd.path), {}).keep("w", 0, b"spec", old)
    DescriptorStore(telling(systemd.path), handed_over(systemd)).keep("w", 0, b"other", new)
    systemd.read()
    (kept,) = systemd.kept.values()
    assert os.pread(kept, 3, 0) == b"new"
    os.close(old)
    os.close(new)


def test_a_pool_that_could_not_be_had_at_once_is_there_for_the_next_attempt_and_goes_if_it_is_none(
    systemd: Systemd,
) -> None:
    pool = memfd(b"kept")
    DescriptorStore(telling(systemd.path), {}).keep("w", 0, b"spec", pool)
    os.close(pool)
    store = DescriptorStore(telling(systemd.path), handed_over(systemd))
    for _ in range(2):
        taken = store.take("w", 0, b"spec", 0)
        assert os.pread(taken, 4, 0) == b"kept"
        os.close(taken)
    store.drop("w")
    assert store.take("w", 0, b"spec", 0) == -1
    systemd.read()
    assert not systemd.kept


def test_a_worker_with_another_layout_gives_its_old_pool_up(systemd: Systemd) -> None:
    pool = memfd(b"old")
    DescriptorStore(telling(systemd.path), {}).keep("w", 0, b"spec", pool)
    os.close(pool)
    successor = DescriptorStore(telling(systemd.path), handed_over(systemd))
    assert successor.take("w", 0, b"other spec", 0) == -1
    assert successor.unclaimed == 0
    systemd.read()
    assert not systemd.kept


def test_an_ended_pool_and_one_that_nobody_came_for_are_given_back(systemd: Systemd) -> None:
    pools = [memfd(b"a"), memfd(b"b")]
    store = DescriptorStore(telling(systemd.path), {})
    for worker, pool in zip("ab", pools, strict=True):
        store.keep(worker, 0, b"spec", pool)
        os.close(pool)
    store.drop("a")
    store.drop("a")
    successor = DescriptorStore(telling(systemd.path), handed_over(systemd))
    assert len(systemd.kept) == 1
    successor.drop_unclaimed()
    systemd.read()
    assert not systemd.kept


@pytest.mark.real
def test_a_stored_pool_goes_to_nobody_beside_the_process_that_has_it_mapped_until_that_has_ended(
    systemd: Systemd,
) -> None:
    pool = memfd(b"kept")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as holder:
        first = DescriptorStore(telling(systemd.path), {})
        first.keep("w", 0, b"spec", pool)
        first.lent("w", 0, os.getpid())
        first.lent("w", 0, holder.pid)
        os.close(pool)
        store = DescriptorStore(telling(systemd.path), handed_over(systemd))
        assert store.unclaimed == 1
        with pytest.raises(Unavailable, match=f"process {holder.pid} had it before this daemon started") as refused:
            store.take("w", 0, b"spec", os.getpid())
        assert refused.value.code is ErrorCode.POOL_BUSY
        os.close(store.take("w", 0, b"spec", holder.pid))
        holder.communicate(b"\n")
    os.close(store.take("w", 0, b"spec", os.getpid()))
    store.lent("w", 0, os.getpid())
    systemd.read()
    assert len(systemd.kept) == 2
    store.drop("w")
    systemd.read()
    assert not systemd.kept


def test_what_is_known_of_processes_goes_with_the_pools_that_nobody_came_for(systemd: Systemd) -> None:
    pool = memfd(b"kept")
    first = DescriptorStore(telling(systemd.path), {})
    first.keep("w", 0, b"spec", pool)
    first.lent("w", 0, os.getpid())
    os.close(pool)
    DescriptorStore(telling(systemd.path), handed_over(systemd)).drop_unclaimed()
    systemd.read()
    assert not systemd.kept


@pytest.mark.real
def test_descriptors_are_taken_from_the_environment_by_name_and_not_inherited() -> None:
    code = textwrap.dedent("""
        import os
        from kvd.daemon.systemd import received_descriptors
        os.dup2(os.memfd_create("x"), 3)
        os.dup2(3, 4)
        environ = {"LISTEN_FDS": "2", "LISTEN_FDNAMES": "pool-a:pool-b", "LISTEN_PID": str(os.getpid())}
        assert received_descriptors(dict(environ, LISTEN_PID="1")) == {}
        assert received_descriptors(environ) == {"pool-a": 3, "pool-b": 4}
        assert not environ and not os.get_inheritable(3)
        assert received_descriptors(environ) == {}
    """)
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE)


def test_a_number_of_descriptors_that_is_none_is_refused_from_systemd_and_left_to_whom_it_is_meant_for() -> None:
    with pytest.raises(BadRequest, match="LISTEN_FDS is 'x', which is no number"):
        received_descriptors({"LISTEN_FDS": "x", "LISTEN_PID": str(os.getpid())})
    assert received_descriptors({"LISTEN_FDS": "x", "LISTEN_PID": "1"}) == {}


def test_a_pool_that_is_asked_for_at_the_end_of_a_standstill_is_not_dropped_before(systemd: Systemd) -> None:
    pool, loop = memfd(b"kept"), VirtualLoop()
    DescriptorStore(telling(systemd.path), {}).keep("w", 0, b"spec", pool)
    os.close(pool)
    store = DescriptorStore(telling(systemd.path), handed_over(systemd))
    store.drop_unclaimed_after(loop, 5.0)
    loop.stand_still(60.0)
    loop.run_until(60.0)
    taken = store.take("w", 0, b"spec", 0)  # it lay in the socket
    assert os.pread(taken, 4, 0) == b"kept"
    os.close(taken)
    loop.run_until(61.0)
    assert store.unclaimed == 0
