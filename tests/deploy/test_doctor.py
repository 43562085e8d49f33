"""Single checks of the doctor, on hosts made of files."""

import contextlib
import io
import os
import re
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from rich.console import Console, RenderableType

from kvd.cli.doctor import _view
from kvd.cli.status import status_view
from kvd.cli.top import Rates, view
from kvd.doctor import Finding, Level, loopback, samehost
from kvd.doctor.daemon import check_daemon
from kvd.doctor.host import check_groups, check_huge_pages, check_memlock, check_rdma, check_wait
from kvd.doctor.samehost import check_copy
from kvd.net.inquiry import Inquiry
from kvd.protocol.status import ProcessorStatus, Totals, decode
from tests.support.fleet import Fleet
from tests.support.patience import PATIENCE

MEMINFO = "HugePages_Total: 8\nHugePages_Free: {free}\nHugepagesize: 2048 kB\n"


def test_a_low_memlock_limit_is_named_with_its_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8 << 20, 8 << 20))
    finding = check_memlock()
    assert finding.level is Level.NOTE
    assert "8192 KiB" in finding.text
    assert "LimitMEMLOCK=infinity" in finding.fix
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert check_memlock().level is Level.OK


def test_huge_pages_are_counted_and_their_absence_has_a_fix() -> None:
    assert "5 reserved pages of 2 MiB" in check_huge_pages(MEMINFO.format(free=5), "").text
    assert check_huge_pages(MEMINFO.format(free=0), "always [advise] never").level is Level.OK
    missing = check_huge_pages(MEMINFO.format(free=0), "always advise [never]")
    assert missing.level is Level.NOTE
    assert "vm.nr_hugepages" in missing.fix


def test_a_pool_of_another_process_is_copied_and_its_speed_told() -> None:
    finding = check_copy(60.0)
    assert finding.level in (Level.OK, Level.NOTE), finding
    assert re.search(r"64 MiB of another process at \d+\.\d GB/s; stamps can", finding.text)


def test_a_copy_without_stamps_is_no_fault_and_wrong_bytes_are_one() -> None:
    without = samehost._judge(samehost._Result(1e9, stamps=False, arrived=True))
    assert without.level is Level.NOTE
    assert "proofs cost a message each" in without.text
    assert samehost._judge(samehost._Result(1e9, stamps=True, arrived=False)).level is Level.BROKEN


def test_a_copy_that_does_not_end_or_fails_is_broken_and_names_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "did not end within 0.001 s" in check_copy(0.001).text
    monkeypatch.setattr(samehost, "boot_id", lambda: "x" * 1000)
    failed = check_copy(60.0)
    assert failed.level is Level.BROKEN
    assert failed.text.startswith("bad_message")


def test_without_nixl_other_hosts_cannot_be_reached_and_nothing_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> str:
        raise ImportError("NIXL is not installed: pip install it")

    monkeypatch.setattr(loopback, "nixl_name", missing)
    (finding,) = loopback.check_transfer(60.0)
    assert (finding.level, finding.fix) == (Level.NOTE, "NIXL is not installed: pip install it")


def device(root: Path, name: str, state: str) -> None:
    port = root / "class" / name / "ports/1"
    port.mkdir(parents=True)
    (port / "state").write_text(state)


def test_rdma_devices_are_judged_by_their_node_and_their_port(tmp_path: Path) -> None:
    assert check_rdma(tmp_path / "class", tmp_path / "dev")[0].level is Level.NOTE
    device(tmp_path, "mlx5_0", "4: ACTIVE\n")
    device(tmp_path, "mlx5_1", "1: DOWN\n")
    (closed,) = check_rdma(tmp_path / "class", tmp_path / "dev")
    assert closed.level is Level.SLOW
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/uverbs0").touch()
    found = {finding.subject: finding.level for finding in check_rdma(tmp_path / "class", tmp_path / "dev")}
    assert found == {"RDMA mlx5_0": Level.OK, "RDMA mlx5_1": Level.SLOW}


def test_how_long_threads_waited_for_a_processor_is_a_finding_only_if_it_was_long() -> None:
    assert check_wait(ProcessorStatus(60.0, {"loop": 0.5, "copy": 5.9})).level is Level.OK
    starved = check_wait(ProcessorStatus(60.0, {"loop": 0.5, "copy": 12.34}))
    assert starved.level is Level.SLOW
    assert starved.text == "in the last 60 s threads waited for a processor: loop 0.5 s, copy 12.3 s"
    assert all(word in starved.fix for word in ("cpu.weight", "pin", "kernel.sched_autogroup_enabled"))
    unknown = check_wait(ProcessorStatus(60.0, {}))
    assert unknown.level is Level.NOTE
    assert "this kernel does not count it" in unknown.text


class Host:
    """Processes, their sessions and control groups."""

    def __init__(self, root: Path, autogroup: int | None) -> None:
        self.proc, self.cgroups = root / "proc", root / "cgroups"
        self.cgroups.mkdir()
        (self.proc / "sys/kernel").mkdir(parents=True)
        if autogroup is not None:
            (self.proc / "sys/kernel/sched_autogroup_enabled").write_text(f"{autogroup}\n")

    def process(self, pid: int, session: int, group: str = "/") -> None:
        (self.proc / str(pid)).mkdir()
        (self.proc / str(pid) / "autogroup").write_text(f"/autogroup-{session} nice 0\n")
        (self.proc / str(pid) / "cgroup").write_text(f"0::{group}\n")

    def group(self, name: str, **files: str) -> None:
        (self.cgroups / name).mkdir(parents=True)
        for file, text in files.items():
            (self.cgroups / name / file.replace("_", ".")).write_text(f"{text}\n")

    def findings(self, workers: dict[str, int]) -> list[Finding]:
        return check_groups(10, workers, self.proc, self.cgroups)


@pytest.mark.parametrize("autogroup", [None, 0, 1])
def test_a_daemon_in_another_session_than_its_engine_is_found_where_sessions_are_weighed(
    tmp_path: Path, autogroup: int | None
) -> None:
    host = Host(tmp_path, autogroup)
    host.group("engine", cpu_weight="100")
    host.process(10, session=1)
    host.process(11, session=1)
    host.process(12, session=2)
    host.process(13, session=3, group="/engine")
    found = host.findings({"beside": 11, "apart": 12, "grouped": 13, "hidden": 0})
    assert [finding.level for finding in found] == ([Level.SLOW] if autogroup else [])
    for finding in found:
        assert "the daemon (pid 10) and the engine of apart (pid 12) are in two sessions" in finding.text
        assert "sysctl kernel.sched_autogroup_enabled=0" in finding.fix


def test_a_daemon_that_was_started_in_no_session_is_apart_from_an_engine_with_one(tmp_path: Path) -> None:
    host = Host(tmp_path, autogroup=1)
    for pid in (10, 11, 12):
        host.process(pid, session=1)
    for pid in (10, 11):
        (host.proc / str(pid) / "autogroup").write_text("")  # as the kernel says it
    (finding,) = host.findings({"beside": 11, "apart": 12})
    assert "the engine of apart (pid 12)" in finding.text


def test_a_worker_that_is_gone_meanwhile_hides_nothing_of_the_others(tmp_path: Path) -> None:
    host = Host(tmp_path, autogroup=1)
    host.process(10, session=1)
    host.process(12, session=2)
    (finding,) = host.findings({"gone": 11, "apart": 12})
    assert "the engine of apart (pid 12)" in finding.text


def test_a_control_group_that_weighs_little_or_has_a_quota_is_found_with_its_figures(tmp_path: Path) -> None:
    host = Host(tmp_path, autogroup=1)
    stat = "nr_throttled 9\nthrottled_usec 2500000"
    host.group("pods", cpu_weight="39", cpu_max="150000 100000", cpu_stat=stat)
    host.group("pods/kvd", cpu_weight="20", cpu_max="50000 100000", cpu_stat="nr_throttled 0\nthrottled_usec 0")
    host.process(10, session=1, group="/pods/kvd")
    host.process(12, session=2)
    inner, outer, weight = host.findings({"w": 12})
    assert (inner.level, outer.level, weight.level) == (Level.NOTE, Level.SLOW, Level.SLOW)
    assert inner.text == f"{host.cgroups}/pods/kvd may use 0.5 cores, and was not stopped for using more yet"
    assert outer.text.endswith("may use 1.5 cores, and was stopped 9 times for using more, for 2.5 s altogether")
    assert weight.text == f"{host.cgroups}/pods/kvd has cpu.weight 20, where 100 is usual"
    (host.cgroups / "pods/kvd/cpu.weight").write_text("1000\n")
    assert host.findings({})[-1].level is Level.OK


def test_a_daemon_that_is_gone_meanwhile_is_no_fault_of_the_doctors(tmp_path: Path) -> None:
    (finding,) = Host(tmp_path, autogroup=1).findings({"w": 12})
    assert finding.level is Level.NOTE
    assert "/10/cgroup" in finding.text


def test_a_path_that_is_no_socket_is_broken(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    mode, answer = check_daemon(str(tmp_path / "file"), 1.0)
    assert (mode.level, answer.level) == (Level.BROKEN, Level.BROKEN)
    assert "not a socket" in mode.text


def test_what_another_user_lays_beside_the_sockets_hides_no_daemon_that_shares_a_user(
    tmp_path: Path, fleet: Fleet
) -> None:
    one, other = fleet.daemon("one"), fleet.daemon("other")
    other.serving()
    one.serving()
    beside = Path(one.socket).parent.parent / f"{tmp_path.name}-odd"
    beside.mkdir()
    try:
        (beside / "loop.pools").symlink_to("loop.pools")
        (Path(one.socket).parent / "loop.pools").symlink_to(beside / "loop.pools")
        (note,) = [finding for finding in check_daemon(str(one.socket), PATIENCE) if "may write to" in finding.text]
        assert f"{other.socket}.pools" in note.text
    finally:
        (beside / "loop.pools").unlink()
        beside.rmdir()


def test_daemons_that_share_a_user_are_named_with_what_that_means(fleet: Fleet) -> None:
    one, other = fleet.daemon("one"), fleet.daemon("other")
    other.serving()
    one.serving()
    (note,) = [finding for finding in check_daemon(str(one.socket), PATIENCE) if "may write to" in finding.text]
    assert note.level is Level.NOTE
    assert note.text.startswith(f"user {os.geteuid()} also runs the daemon at ")
    assert f"{other.socket}.pools" in note.text  # and those of other tests, whose folders lie beside this one's
    other.kill()  # its socket stays
    assert not [finding for finding in check_daemon(str(one.socket), PATIENCE) if "may write to" in finding.text]


def test_a_report_that_cannot_be_read_is_a_finding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    report = b'{"unknown":' + 100_000 * b"[" + 100_000 * b"]" + b"}"
    told = contextlib.nullcontext(SimpleNamespace(credentials=None, status=lambda _: report))
    monkeypatch.setattr("kvd.doctor.daemon.Inquiry", lambda _: told)
    last = check_daemon(str(tmp_path), PATIENCE)[-1]
    assert last.level is Level.BROKEN
    assert "this is no status of this release: maximum recursion depth" in last.text


WORDS = "no\x1b[2J\x1b]0;x\x07\r\nok    daemon  [red]all is well"


def harmless(view: RenderableType) -> bool:
    """Whether it moves no terminal's cursor, and has no line but its own."""
    out = io.StringIO()
    Console(file=out, highlight=False, width=4000).print(view)
    lines = out.getvalue().split("\n")
    assert "[red]all is well" in out.getvalue()
    return all(line.isprintable() for line in lines) and not any(line.lstrip().startswith("ok ") for line in lines)


def said_by_somebody_else(value: Any) -> Any:
    """The same with other texts, also in place of names that the daemon chooses."""
    match value:
        case str():
            return WORDS
        case Totals():  # the bounds of its buckets are numbers, or it is no status
            return msgspec.structs.replace(value, pulls=said_by_somebody_else(value.pulls))
        case msgspec.Struct():
            said = {field: said_by_somebody_else(item) for field, item in msgspec.structs.asdict(value).items()}
            return msgspec.structs.replace(value, **said)
        case dict():
            return {said_by_somebody_else(key): said_by_somebody_else(item) for key, item in value.items()}
        case list() | tuple():
            return type(value)(map(said_by_somebody_else, value))
    return value


def test_what_others_say_makes_no_findings_and_moves_no_cursor() -> None:
    assert harmless(_view([Finding(f"peer {WORDS}", Level.BROKEN, WORDS, WORDS)]))


def test_nothing_that_a_status_says_makes_lines_or_moves_the_cursor(fleet: Fleet) -> None:
    one, other = fleet.daemon("one"), fleet.daemon("other")
    source, target = fleet.worker(one, "s"), fleet.worker(other, "t")
    target.call("pull", name="r", ticket=source.call("offer", name="r", ids=[0]), ids=[0])
    assert target.outcome("r")["kind"] == "Done"
    with Inquiry(str(other.socket)) as inquiry:
        status = decode(inquiry.status(PATIENCE))
    assert status.pools
    assert status.handshake
    said = said_by_somebody_else(status)
    assert harmless(status_view(said))
    rates = Rates()
    rates.pulls_per_second = dict.fromkeys(said.totals.pulls, 1.0)
    assert rates.pulls_per_second
    assert harmless(view(said, rates))
