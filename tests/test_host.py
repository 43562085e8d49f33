"""What is read of the host, on cgroups made of files."""

import os
from pathlib import Path

import pytest

from kvd.host import cores


@pytest.mark.parametrize(
    ("own", "above", "expected"),
    [("max 100000", None, 8), ("150000 100000", None, 2), ("max 100000", "50000 100000", 1), (None, None, 8)],
)
def test_a_cgroups_quota_of_time_counts_as_fewer_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str | None, above: str | None, expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    (tmp_path / "cgroups/kubepods/kvd").mkdir(parents=True)
    for folder, quota in (("kubepods/kvd", own), ("kubepods", above)):
        if quota:
            (tmp_path / "cgroups" / folder / "cpu.max").write_text(f"{quota}\n")
    (tmp_path / "cgroup").write_text("1:cpu:/\n0::/kubepods/kvd\n")
    assert cores(tmp_path / "cgroup", tmp_path / "cgroups") == expected
    (tmp_path / "cgroup").write_text("1:cpu:/\n")
    assert cores(tmp_path / "cgroup", tmp_path / "cgroups") == 8
