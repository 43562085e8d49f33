"""Single checks of the doctor, on hosts made of files."""

import ctypes
import resource
from pathlib import Path

import pytest

from kvd.doctor import loopback, samehost
from kvd.doctor.daemon import check_daemon
from kvd.doctor.devices import check_rdma
from kvd.doctor.finding import Level
from kvd.doctor.memory import check_huge_pages, check_memlock
from kvd.doctor.samehost import check_copy

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


def test_a_copy_that_the_kernel_refuses_is_slow_and_not_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_copy().level is Level.OK
    monkeypatch.setattr(samehost, "_read_from", lambda _owner, _address: 1)
    refused = check_copy()
    assert refused.level is Level.SLOW
    assert "Operation not permitted" in refused.text
    assert "CAP_SYS_PTRACE" in refused.fix


def test_a_copy_of_wrong_bytes_is_not_taken_for_one() -> None:
    other = ctypes.create_string_buffer(b"x" * 64)
    assert samehost._read_from(1 << 22, ctypes.addressof(other)) != 0


@pytest.mark.parametrize(
    ("path", "level"), [("cma/memory posix/memory", Level.OK), ("posix/memory", Level.SLOW), ("tcp/lo", Level.SLOW)]
)
def test_a_transfer_that_is_not_the_kernels_copy_is_slow(path: str, level: Level) -> None:
    assert loopback._judge(path, 1e9, arrived=True).level is level


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


def test_a_path_that_is_no_socket_is_broken(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    mode, answer = check_daemon(str(tmp_path / "file"), 1.0)
    assert (mode.level, answer.level) == (Level.BROKEN, Level.BROKEN)
    assert "not a socket" in mode.text
