"""Pools are mapped while other threads of the process map memory too: theirs stays, whatever becomes of ours."""

import errno
import mmap
import os

import pytest

from kvd.memory import mapping
from kvd.memory.mapping import HUGE_PAGE, Mapping

_ANONYMOUS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_map = mapping._map


@pytest.fixture
def descriptor():
    descriptor = os.memfd_create("kvd:test")
    os.ftruncate(descriptor, HUGE_PAGE)
    yield descriptor
    os.close(descriptor)


def is_mapped(address, length=HUGE_PAGE):
    """Whether every byte is mapped, by one mapping or several."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            start, end = (int(text, 16) for text in line.split()[0].split("-"))
            if start <= address < end:
                length, address = length - (end - address), end
    return length <= 0


class Neighbour:
    """Another thread that maps 2 MiB wherever a pool is about to be mapped, `before` the kernel is asked or after."""

    def __init__(self, times=1, before=True, failure=None):
        self.taken = []
        self._times, self._before, self._failure = times, before, failure

    def __call__(self, address, length, protection, flags, descriptor):
        if descriptor < 0:
            return _map(address, length, protection, flags, descriptor)
        if len(self.taken) < self._times:
            flag = mapping._MAP_FIXED_NOREPLACE if self._before else mapping._MAP_FIXED
            self.taken.append(_map(address, HUGE_PAGE, mmap.PROT_READ, _ANONYMOUS | flag, -1))
        if self._failure:
            raise self._failure
        return _map(address, length, protection, flags, descriptor)

    def check_and_leave(self):
        assert all(is_mapped(address) for address in self.taken)
        for address in self.taken:
            mapping._unmap(address, address + HUGE_PAGE)


def test_a_mapping_that_fails_leaves_alone_what_others_map_there_meanwhile(monkeypatch, descriptor):
    """What hugetlb pages cost that the system does not have: the old mapping is gone, and the new one did not come."""
    neighbour = Neighbour(before=False, failure=OSError(errno.ENOMEM, "no huge pages"))
    monkeypatch.setattr(mapping, "_map", neighbour)
    with pytest.raises(OSError, match="no huge pages"):
        Mapping(descriptor, HUGE_PAGE)
    neighbour.check_and_leave()


def test_a_place_that_is_taken_in_the_last_moment_is_left_to_its_taker(monkeypatch, descriptor):
    neighbour = Neighbour(times=3)
    monkeypatch.setattr(mapping, "_map", neighbour)
    pool = Mapping(descriptor, HUGE_PAGE)
    assert pool.base not in neighbour.taken
    assert len(neighbour.taken) == 3
    pool.close()
    neighbour.check_and_leave()


def test_places_that_are_taken_again_and_again_are_an_error_in_the_end(monkeypatch, descriptor):
    neighbour = Neighbour(times=1 << 30)
    monkeypatch.setattr(mapping, "_map", neighbour)
    with pytest.raises(FileExistsError, match="took the room for 2097152 bytes 100 times"):
        Mapping(descriptor, HUGE_PAGE)
    neighbour.check_and_leave()


def test_a_pool_that_cannot_be_blanked_leaves_alone_what_others_map_there_meanwhile(monkeypatch, descriptor):
    pool = Mapping(descriptor, HUGE_PAGE)

    def fail(address, length, protection, flags, _descriptor):
        _map(address, length, protection, flags, -1)  # another thread's, where the pool has just been
        raise OSError(errno.ENOMEM, "no memory for a mapping")

    monkeypatch.setattr(mapping, "_map", fail)
    with pytest.raises(OSError, match="no memory for a mapping"):
        pool.blank()
    pool.close()
    assert is_mapped(pool.base)
    mapping._unmap(pool.base, pool.base + HUGE_PAGE)
