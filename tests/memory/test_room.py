"""Pools fit into the memory that the host has and the cgroup may use; nobody is killed for one that does not."""

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvd import cgroups, limits
from kvd.errors import ErrorCode, Unavailable
from kvd.memory import memfd, room
from kvd.memory.memfd import Backing, MemfdProvider
from kvd.memory.room import Available, Room
from tests.support.fleet import until
from tests.support.patience import PATIENCE

GROUPS = Path("/sys/fs/cgroup")
POOL = 64 * limits.MIB
FILES = {
    "version 2": ("", "memory.max", "memory.current", ""),
    "version 1": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
}


@pytest.mark.parametrize("version", FILES)
def test_a_cgroups_limit_is_what_is_left_of_it_with_the_caches_of_files(tmp_path: Path, version: str) -> None:
    controller, limit, usage, prefix = FILES[version]
    top = tmp_path / controller
    for folder, most in (("pods/kvd", "1000"), ("pods", "max" if version == "version 2" else str((1 << 63) - 4096))):
        (top / folder).mkdir(parents=True, exist_ok=True)
        (top / folder / limit).write_text(f"{most}\n")
        (top / folder / usage).write_text("700\n")
        stat = f"anon 500\n{prefix}inactive_file 100\n{prefix}active_file 50\n"
        (top / folder / "memory.stat").write_text(stat)
    (tmp_path / "own").write_text(f"9:name=systemd:/\n{'4' if controller else '0'}:{controller}:/pods/kvd\n")
    assert cgroups.memory_limits(tmp_path / "own", tmp_path) == [
        cgroups.MemoryLimit(top / "pods/kvd", limit=1000, free=450)
    ]


def test_a_container_that_sees_its_own_cgroup_as_the_root_finds_its_limit(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000")
    (tmp_path / "memory.current").write_text("2000")
    (tmp_path / "memory.stat").write_text("inactive_file 0\n")
    (tmp_path / "own").write_text("0::/kubepods/of/the/host\n")
    (limit,) = cgroups.memory_limits(tmp_path / "own", tmp_path)
    assert (limit.limit, limit.free) == (1000, 0)


def test_the_tightest_bound_counts_and_leaves_the_daemon_something(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [cgroups.MemoryLimit(Path("/loose"), 1 << 50, 1 << 49), cgroups.MemoryLimit(Path("/tight"), 2 * POOL, POOL)]
    monkeypatch.setattr(room, "memory_limits", lambda: found)
    available = room.available()
    assert available.bytes == POOL - limits.DAEMON_BYTES
    assert f"limit of {2 * POOL} of the cgroup /tight" in available.where
    monkeypatch.setattr(room, "memory_limits", list)
    assert room.available().where == "on this host"


def test_a_pool_above_what_there_is_is_refused_with_both_figures() -> None:
    provider = MemfdProvider(Backing.PLAIN, Room(lambda: Available(POOL, "below a limit")))
    with pytest.raises(
        Unavailable, match=f"needs {POOL} bytes of memory, {POOL} are available below a limit"
    ) as caught:
        provider.allocate("w", POOL)
    assert caught.value.code is ErrorCode.OVERLOADED
    assert f"page tables take another {POOL // 512}" in caught.value.text
    provider.allocate("w", POOL // 2).close()


def test_the_page_tables_of_each_process_that_maps_a_pool_count() -> None:
    look = Available(POOL + POOL // 512, "here")
    MemfdProvider(Backing.PLAIN, Room(lambda: look)).allocate("w", POOL).close()
    with pytest.raises(Unavailable, match=rf"page tables take another {2 * POOL // 512}\b"):
        MemfdProvider(Backing.PLAIN, Room(lambda: look, mappings=2)).allocate("w", POOL)


def test_two_pools_that_are_made_at_once_do_not_pass_one_check_together(monkeypatch: pytest.MonkeyPatch) -> None:
    look = Available(POOL + POOL // 2, "here")
    provider = MemfdProvider(Backing.PLAIN, Room(lambda: look))
    making, go_on = threading.Event(), threading.Event()
    fault_in = memfd._fault_in

    def slowly(mapping: memfd.Mapping, *, huge: bool) -> None:
        making.set()
        assert go_on.wait(PATIENCE)
        fault_in(mapping, huge=huge)

    monkeypatch.setattr(memfd, "_fault_in", slowly)
    first: list[memfd.MemfdPool] = []
    thread = threading.Thread(target=lambda: first.append(provider.allocate("first", POOL)))
    thread.start()
    try:
        assert making.wait(PATIENCE)
        beside = POOL + POOL // 512
        with pytest.raises(Unavailable, match=f"beside {beside} for other pools that are being made"):
            provider.allocate("second", POOL)
    finally:
        go_on.set()
        thread.join()
    first[0].close()
    provider.allocate("second", POOL).close()


def test_what_a_pool_that_is_being_made_has_got_already_is_not_counted_twice() -> None:
    look = Available(2 * POOL, "here")
    fits = Room(lambda: look)
    descriptor = os.memfd_create("pool")
    with fits.taken("w", POOL) as count:
        before = fits._unpromised(look)
        os.ftruncate(descriptor, POOL)
        count(descriptor)
        assert fits._unpromised(look) == before
        os.posix_fallocate(descriptor, 0, POOL)
        assert fits._unpromised(look) == before + POOL
    assert fits._unpromised(look) == 2 * POOL
    os.close(descriptor)


@pytest.fixture
def limited() -> Iterator[tuple[Path, int]]:
    """A cgroup with a limit of memory, of whichever version this host has."""
    version = "version 1" if (GROUPS / "memory").is_dir() else "version 2"
    controller, limit, _, _ = FILES[version]
    group, most = GROUPS / controller / f"kvd-test-{os.getpid()}", 4 * POOL
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    try:
        if not (group / limit).exists():
            pytest.skip("cgroups have no memory controller here")
        (group / limit).write_text(str(most))
        yield group, most
    finally:
        for _ in until("the cgroup is empty"):
            with contextlib.suppress(OSError):
                group.rmdir()
                break


ALLOCATE = """
import sys
from kvd.errors import Unavailable
from kvd.memory.memfd import Backing, MemfdProvider
open(sys.argv[1], "w").write("0")
provider = MemfdProvider(Backing.PLAIN)
provider.allocate("small", int(sys.argv[2])).close()
try:
    provider.allocate("large", int(sys.argv[3])).close()
except Unavailable as error:
    print(error.code, error.text)
"""


@pytest.mark.real
def test_a_process_that_is_asked_for_more_than_its_cgroup_may_use_refuses_and_lives(limited: tuple[Path, int]) -> None:
    group, most = limited
    command = [sys.executable, "-c", ALLOCATE, str(group / "cgroup.procs"), str(POOL), str(most)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith(f"overloaded pool 'large' needs {most} bytes of memory, ")
    assert f"below the limit of {most} of the cgroup {group}" in ran.stdout
