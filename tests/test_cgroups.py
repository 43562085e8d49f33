"""What control groups of both versions say about processors, made of files."""

import os
from pathlib import Path

import pytest

from kvd.cgroups import ProcessorGroup, Quota, memory_limits, processor_group, quotas


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("cpu_", "cpu.")).write_text(f"{text}\n")


@pytest.fixture
def own(tmp_path: Path) -> Path:
    return tmp_path / "own"


def test_the_nearest_group_with_a_weight_is_the_one_that_is_weighed(tmp_path: Path, own: Path) -> None:
    own.write_text("0::/kvd.slice/kvd@0.service/inner\n")
    write(tmp_path / "kvd.slice/kvd@0.service/inner")
    assert processor_group(own, tmp_path) is None
    write(tmp_path / "kvd.slice", cpu_weight="20")
    assert processor_group(own, tmp_path) == ProcessorGroup(tmp_path / "kvd.slice", 20)
    write(tmp_path / "kvd.slice/kvd@0.service", cpu_weight="1000")
    assert processor_group(own, tmp_path) == ProcessorGroup(tmp_path / "kvd.slice/kvd@0.service", 1000)
    own.write_text("0::/\n")
    assert processor_group(own, tmp_path) is None


def test_the_shares_of_version_1_are_told_as_weights(tmp_path: Path, own: Path) -> None:
    write(tmp_path / "cpu", cpu_shares="1024")
    write(tmp_path / "cpu/pods", cpu_shares="512")
    own.write_text("4:cpu,cpuacct:/\n0::/\n")
    assert processor_group(own, tmp_path) is None, "the root is no group"
    own.write_text("4:cpu,cpuacct:/pods\n0::/\n")
    assert processor_group(own, tmp_path) == ProcessorGroup(tmp_path / "cpu/pods", 50)


def test_quotas_of_all_groups_above_are_told_with_what_they_have_cost(tmp_path: Path, own: Path) -> None:
    own.write_text("0::/pods/kvd\n")
    stat = "usage_usec 9\nnr_periods 7\nnr_throttled 3\nthrottled_usec 1500000"
    write(tmp_path / "pods/kvd", cpu_max="150000 100000", cpu_stat=stat)
    write(tmp_path / "pods", cpu_max="max 100000", cpu_stat=stat)
    assert quotas(own, tmp_path) == [Quota(tmp_path / "pods/kvd", 1.5, 3, 1.5)]
    write(tmp_path / "pods", cpu_max="400000 100000", cpu_stat="usage_usec 9")
    assert quotas(own, tmp_path)[1:] == [Quota(tmp_path / "pods", 4.0, 0, 0.0)]


def test_quotas_of_version_1_are_told_in_the_same_way(tmp_path: Path, own: Path) -> None:
    own.write_text("4:cpu:/pods\n0::/\n")
    write(tmp_path / "cpu", cpu_cfs_quota_us="-1", cpu_cfs_period_us="100000")
    stat = "nr_periods 7\nnr_throttled 4\nthrottled_time 2500000000"
    write(tmp_path / "cpu/pods", cpu_cfs_quota_us="50000", cpu_cfs_period_us="100000", cpu_stat=stat)
    assert quotas(own, tmp_path) == [Quota(tmp_path / "cpu/pods", 0.5, 4, 2.5)]


@pytest.mark.parametrize("name", [b"a\rb", b"a\x0bb", "a\u2028b".encode(), b"a\xff\x1b[2Jb", b"a b:c (deleted)"])
def test_groups_of_any_name_are_read_and_shown_as_text(tmp_path: Path, own: Path, name: bytes) -> None:
    folder = tmp_path / os.fsdecode(name)
    write(folder, cpu_weight="50", cpu_max="50000 100000", **{"memory.max": "100", "memory.current": "40"})
    write(folder, **{"memory.stat": "inactive_file 1\nactive_file 2"})
    own.write_bytes(b"9:name=systemd:/" + name + b"\n4:memory:/" + name + b"\n0::/" + name + b"\n")
    assert processor_group(own, tmp_path) == ProcessorGroup(folder, 50)
    assert quotas(own, tmp_path) == [Quota(folder, 0.5, 0, 0.0)]
    assert memory_limits(own, tmp_path)[0].free == 63


def test_where_no_hierarchy_is_mounted_there_is_no_group(tmp_path: Path, own: Path) -> None:
    own.write_text("")
    assert processor_group(own, tmp_path) is None
    assert quotas(own, tmp_path) == []
    assert memory_limits(own, tmp_path) == []
