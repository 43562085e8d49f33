"""What is read of the host; cgroups are made of files."""

import os
import resource
from pathlib import Path

import pytest

from kvd import host
from kvd.errors import BadRequest


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
    assert host.cores(tmp_path / "cgroup", tmp_path / "cgroups") == expected
    (tmp_path / "cgroup").write_text("1:cpu:/\n")
    assert host.cores(tmp_path / "cgroup", tmp_path / "cgroups") == 8


@pytest.mark.parametrize(
    ("soft", "hard", "wanted", "expected"),
    [
        (64, 4096, 1000, (1000, 4096)),
        (64, 512, 1000, (512, 512)),
        (64, resource.RLIM_INFINITY, 1000, (1000, resource.RLIM_INFINITY)),
        (2000, 4096, 1000, None),
    ],
)
def test_the_limit_of_open_files_is_raised_as_far_as_it_may_be(monkeypatch, soft, hard, wanted, expected) -> None:
    limits_set = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: limits_set.append(pair))
    host.raise_open_files(wanted)
    assert limits_set == ([expected] if expected else [])


def test_too_few_open_files_to_start_with_are_refused_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 255))
    with pytest.raises(BadRequest, match=r"at most 255 files may be open, and 256 must be; raise LimitNOFILE"):
        host.raise_open_files(1000)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_an_address_leads_to_the_interface_that_has_it(address: str) -> None:
    assert host.interface_of(address) == "lo"


@pytest.mark.parametrize("address", ["203.0.113.77", "2001:db8::77", "decode.example", "eth0", ""])
def test_what_no_interface_has_leads_to_none(address: str) -> None:
    assert host.interface_of(address) is None


@pytest.mark.parametrize("key", ["", "#" + "ab" * 32])
def test_an_address_is_the_same_without_links_but_for_its_folder(tmp_path: Path, key: str) -> None:
    (tmp_path / "folder/inner").mkdir(parents=True)
    (tmp_path / "link").symlink_to("folder/inner")
    named = host.without_links(f"ipc://{tmp_path}/link/p.peers{key}")
    assert named == f"ipc://{tmp_path}/folder/inner/p.peers{key}"
    assert host.without_links(named) == named
    # The socket itself, which a daemon that starts replaces, is what it is called.
    (tmp_path / "p.peers").symlink_to("other.peers")
    assert host.without_links(f"ipc://{tmp_path}/p.peers{key}") == f"ipc://{tmp_path}/p.peers{key}"
    (tmp_path / "later").symlink_to("folder")
    named = host.without_links(f"ipc://{tmp_path}/later/a/b/p.peers{key}")
    assert named == f"ipc://{tmp_path}/folder/a/b/p.peers{key}"
    for link, target in (("long", "x" * 100), ("odd", "a b")):
        (tmp_path / target).mkdir()
        (tmp_path / link).symlink_to(target)
    (tmp_path / "0").symlink_to("folder")
    for number in range(2000):  # more than anybody follows
        (tmp_path / f"{number + 1}").symlink_to(f"{number}")
    nowhere = [f"ipc://{tmp_path}/{folder}/p.peers{key}" for folder in ("2000", "p.peers", "\0", "long", "odd")]
    for address in (f"tcp://host:1{key}", "ipc://p.peers", *nowhere):
        assert host.without_links(address) == address
