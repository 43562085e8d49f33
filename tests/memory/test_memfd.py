import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvd.errors import BadRequest, ErrorCode, Unavailable
from kvd.memory.mapping import HUGE_PAGE, Mapping
from kvd.memory.memfd import SEALS, Backing, MemfdPool, MemfdProvider
from tests.support.descriptors import no_descriptors_left

NR_HUGEPAGES = Path("/proc/sys/vm/nr_hugepages")


def failing(_mapping: Mapping) -> None:
    raise OSError(errno.ENOMEM, "no memory")


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    def state() -> tuple[list[str], str]:
        maps = Path("/proc/self/maps").read_text()
        return sorted(os.listdir("/proc/self/fd")), "\n".join(line for line in maps.splitlines() if "memfd:" in line)

    before = state()
    yield
    assert state() == before


@pytest.fixture
def hugetlb_pages() -> Iterator[int]:
    before = NR_HUGEPAGES.read_text()
    try:
        NR_HUGEPAGES.write_text(str(int(before) + 4))
    except OSError as error:
        pytest.skip(f"hugetlb pages cannot be reserved here: {error}")
    try:
        if int(NR_HUGEPAGES.read_text()) < int(before) + 4:
            pytest.skip("the kernel has no four free huge pages")
        yield 4
    finally:
        NR_HUGEPAGES.write_text(before)


def own_bytes(pool: MemfdPool) -> memoryview:
    """The daemon's own view of its mapping."""
    return memoryview((ctypes.c_char * pool.size).from_address(pool.base)).cast("B")


def worker_map(pool: MemfdPool) -> mmap.mmap:
    return mmap.mmap(pool.descriptor, os.fstat(pool.descriptor).st_size)


def resident_bytes(pool: MemfdPool) -> int:
    return os.fstat(pool.descriptor).st_blocks * 512


@pytest.mark.parametrize("backing", [Backing.AUTO, Backing.PLAIN])
def test_a_new_pool_is_zeroed_faulted_in_and_aligned(backing: Backing) -> None:
    pool = MemfdProvider(backing).allocate("prefill-0", HUGE_PAGE + 1)
    assert pool.size == HUGE_PAGE + 1
    assert pool.base % HUGE_PAGE == 0
    assert resident_bytes(pool) == 2 * HUGE_PAGE
    assert bytes(own_bytes(pool)) == bytes(HUGE_PAGE + 1)
    pool.close()


def test_bytes_written_by_the_worker_are_the_daemons_and_the_other_way_round() -> None:
    pool = MemfdProvider().allocate("prefill-0", 4096)
    with worker_map(pool) as mapped:
        mapped[7:11] = b"work"
        own_bytes(pool)[20:24] = b"here"
        assert bytes(own_bytes(pool)[7:11]) == b"work"
        assert mapped[20:24] == b"here"
    pool.close()


def test_the_worker_can_neither_cut_nor_grow_nor_seal_a_pool() -> None:
    pool = MemfdProvider().allocate("prefill-0", 4096)
    lent = os.dup(pool.descriptor)
    for attempt in (
        lambda: os.ftruncate(lent, 0),
        lambda: os.ftruncate(lent, 2 * HUGE_PAGE),
        lambda: fcntl.fcntl(lent, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
    ):
        with pytest.raises(PermissionError):
            attempt()
    os.close(lent)
    pool.close()


def test_a_hole_that_the_worker_punches_costs_it_its_bytes_and_nobody_anything_else() -> None:
    """No seal that leaves a pool writable stops it: what lay there reads as zeros, here and for whoever reads it."""
    pool = MemfdProvider(Backing.PLAIN).allocate("w", 2 * HUGE_PAGE)
    try:
        view = (ctypes.c_uint8 * pool.size).from_address(pool.base)
        view[0] = view[HUGE_PAGE] = 7
        keep_size, punch_hole = 1, 2
        libc = ctypes.CDLL(None, use_errno=True)
        libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)
        assert libc.fallocate(pool.descriptor, keep_size | punch_hole, 0, HUGE_PAGE) == 0, ctypes.get_errno()
        assert (view[0], view[HUGE_PAGE]) == (0, 7)
        view[0] = 9
        assert os.pread(pool.descriptor, 1, 0) == b"\x09"
    finally:
        pool.close()


def test_quotas_count_whole_pages() -> None:
    provider = MemfdProvider()
    assert [provider.footprint(size) for size in (1, HUGE_PAGE, HUGE_PAGE + 1)] == [HUGE_PAGE, HUGE_PAGE, 2 * HUGE_PAGE]


def test_plain_is_plain_even_where_huge_pages_can_be_had() -> None:
    pool = MemfdProvider(Backing.PLAIN).allocate("prefill-0", HUGE_PAGE)
    assert pool.backing == "plain"
    pool.close()


def test_transparent_huge_pages_are_counted_not_assumed() -> None:
    try:
        pool = MemfdProvider(Backing.THP).allocate("prefill-0", 3 * HUGE_PAGE)
    except Unavailable as error:
        pytest.skip(f"no transparent huge pages here: {error.text}")
    assert pool.backing == "thp"
    smaps = Path("/proc/self/smaps").read_text()
    entry = smaps[smaps.index(f"{pool.base:08x}-") :]
    assert f"ShmemPmdMapped:{3 * HUGE_PAGE // 1024:>9} kB" in entry[: entry.index("VmFlags")]
    pool.close()


@pytest.mark.alone  # daemons of other tests take such pages, too
def test_hugetlb_pages_are_taken_where_the_system_has_them(hugetlb_pages: int) -> None:
    pool = MemfdProvider().allocate("prefill-0", hugetlb_pages * HUGE_PAGE)
    assert pool.backing == "hugetlb"
    with worker_map(pool) as mapped:
        mapped[-1] = 9
    assert own_bytes(pool)[-1] == 9
    pool.close()


@pytest.mark.alone  # daemons of other tests take such pages, too
def test_hugetlb_pages_are_reserved_when_the_pool_is_made_not_when_it_is_touched(hugetlb_pages: int) -> None:
    provider = MemfdProvider(Backing.HUGETLB)
    first = provider.allocate("first", 3 * HUGE_PAGE)
    with pytest.raises(Unavailable, match=r"needs 2 free hugetlb pages .* vm\.nr_hugepages") as caught:
        provider.allocate("second", 2 * HUGE_PAGE)
    assert caught.value.code is ErrorCode.OVERLOADED
    first.close()


@pytest.mark.alone  # daemons of other tests take such pages, too
def test_auto_does_without_hugetlb_pages_where_there_are_too_few(hugetlb_pages: int) -> None:
    pool = MemfdProvider().allocate("prefill-0", (hugetlb_pages + 1) * HUGE_PAGE)
    assert pool.backing in ("thp", "plain")
    pool.close()


@pytest.mark.alone  # daemons of other tests take such pages, too
def test_a_hugetlb_pool_is_adopted_with_its_bytes(hugetlb_pages: int) -> None:
    first = MemfdProvider(Backing.HUGETLB).allocate("prefill-0", HUGE_PAGE)
    own_bytes(first)[:4] = b"kept"
    second = MemfdProvider().adopt(os.dup(first.descriptor), HUGE_PAGE)
    assert second.backing == "hugetlb"
    assert bytes(own_bytes(second)[:4]) == b"kept"
    first.close()
    second.close()


def test_more_memory_than_there_is_is_refused_with_both_numbers() -> None:
    with pytest.raises(Unavailable, match=rf"needs {1 << 50} bytes of memory, \d+ are available") as caught:
        MemfdProvider(Backing.PLAIN).allocate("prefill-0", 1 << 50)
    assert caught.value.code is ErrorCode.OVERLOADED


def test_an_empty_pool_is_refused() -> None:
    with pytest.raises(BadRequest, match="pool 'prefill-0' of 0 bytes"):
        MemfdProvider().allocate("prefill-0", 0)


def test_an_adopted_pool_has_the_bytes_and_the_backing_it_had() -> None:
    first = MemfdProvider().allocate("prefill-0", HUGE_PAGE + 100)
    own_bytes(first)[-4:] = b"kept"
    backing = first.backing
    second = MemfdProvider().adopt(os.dup(first.descriptor), HUGE_PAGE + 100)  # the next daemon's
    assert second.backing == backing
    assert bytes(own_bytes(second)[-4:]) == b"kept"
    first.close()
    second.close()


def test_the_memory_of_a_pool_is_not_adopted_for_another_one_until_that_has_ended() -> None:
    """A peer of the host takes no two pools with one file."""
    provider = MemfdProvider()
    first = provider.allocate("prefill-0", HUGE_PAGE)
    kept = os.dup(first.descriptor)
    with pytest.raises(BadRequest, match="that of a pool that has not ended: detach that first"):
        provider.adopt(os.dup(kept), HUGE_PAGE)
    first.close()
    second = provider.adopt(os.dup(kept), HUGE_PAGE)
    with pytest.raises(BadRequest, match="has not ended"):
        provider.adopt(kept, HUGE_PAGE)
    second.close()


def refusal(descriptor: int, size: int) -> str:
    with pytest.raises(BadRequest) as caught:
        MemfdProvider().adopt(descriptor, size)
    assert caught.value.code is ErrorCode.BAD_POOL
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    return caught.value.text


def test_a_descriptor_that_is_no_memfd_is_refused_and_closed() -> None:
    assert "no memfd" in refusal(os.open("/dev/null", os.O_RDWR), 4096)


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_GROW, fcntl.F_SEAL_SHRINK, SEALS & ~fcntl.F_SEAL_SHRINK])
def test_a_memfd_whose_size_could_change_is_refused_and_closed(seals: int) -> None:
    descriptor = os.memfd_create("worker", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, HUGE_PAGE)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    assert "could change under us" in refusal(descriptor, 4096)


@pytest.mark.parametrize("size", [-1, 0, HUGE_PAGE + 1])
def test_a_sealed_memfd_of_another_size_is_refused_and_closed(size: int) -> None:
    pool = MemfdProvider().allocate("prefill-0", HUGE_PAGE)
    assert f"the memfd has {HUGE_PAGE} bytes" in refusal(os.dup(pool.descriptor), size)
    pool.close()


def test_a_pool_that_cannot_be_written_to_is_refused_and_closed() -> None:
    descriptor = os.memfd_create("worker", os.MFD_ALLOW_SEALING)
    os.posix_fallocate(descriptor, 0, HUGE_PAGE)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS | fcntl.F_SEAL_WRITE)
    assert "cannot be mapped writable" in refusal(descriptor, HUGE_PAGE)


def test_a_pool_that_moves_keeps_its_bytes_and_leaves_zeros() -> None:
    pool = MemfdProvider().allocate("prefill-0", HUGE_PAGE)
    with mmap.mmap(pool.descriptor, HUGE_PAGE) as lent:
        lent[:4] = b"kept"
        before = pool.base
        pool.move()
        assert pool.base != before
        assert pool.base % HUGE_PAGE == 0
        assert ctypes.string_at(pool.base, 4) == b"kept"
        assert ctypes.string_at(before, HUGE_PAGE) == bytes(HUGE_PAGE)
        lent[:4] = b"more"
        assert ctypes.string_at(pool.base, 4) == b"more"
    pool.close()


def test_a_pool_that_cannot_be_faulted_in_at_another_address_stays_where_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = MemfdProvider().allocate("prefill-0", HUGE_PAGE)
    before = pool.base
    monkeypatch.setattr(Mapping, "populate", failing)
    with pytest.raises(Unavailable, match=r"cannot be mapped anew: .*no memory"):
        pool.move()
    assert pool.base == before
    pool.close()


def test_a_pool_that_has_moved_does_not_use_an_old_address_that_could_not_be_blanked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = MemfdProvider().allocate("prefill-0", HUGE_PAGE)
    old = pool._mapping
    monkeypatch.setattr(Mapping, "blank", failing)
    with pytest.raises(OSError, match="no memory"):
        pool.move()
    assert pool.base != old.base
    assert pool.length == HUGE_PAGE
    old.close()
    pool.close()


def test_closing_twice_closes_once() -> None:
    pool = MemfdProvider().allocate("prefill-0", 4096)
    pool.close()
    pool.close()


@pytest.mark.parametrize("backing", [Backing.PLAIN, Backing.THP])
def test_a_pool_that_ends_gives_its_memory_back_though_its_worker_keeps_it_mapped(backing: Backing) -> None:
    try:
        pool = MemfdProvider(backing).allocate("prefill-0", 2 * HUGE_PAGE)
    except Unavailable as error:
        pytest.skip(f"no transparent huge pages here: {error.text}")
    with worker_map(pool) as mapped:
        mapped[0] = mapped[-1] = 7
        kept = os.dup(pool.descriptor)
        pool.free()
        assert os.fstat(kept).st_blocks == 0
        assert (mapped[0], mapped[-1]) == (0, 0)
        assert "ended" in refusal(kept, 2 * HUGE_PAGE)


@pytest.mark.alone  # daemons of other tests take such pages, too
def test_hugetlb_pages_of_a_pool_that_ends_can_be_had_again_though_its_worker_keeps_it_mapped(
    hugetlb_pages: int,
) -> None:
    provider = MemfdProvider(Backing.HUGETLB)
    first = provider.allocate("first", hugetlb_pages * HUGE_PAGE)
    with worker_map(first) as mapped:
        mapped[0] = 7
        first.free()
        second = provider.allocate("second", hugetlb_pages * HUGE_PAGE)
        second.close()
        assert mapped[0] == 0


def test_a_pool_for_which_no_descriptor_is_left_is_refused_with_that_name() -> None:
    with no_descriptors_left(), pytest.raises(Unavailable, match="Too many open files"):
        MemfdProvider().allocate("p", HUGE_PAGE)
