"""Descriptors that others passed: closing them keeps nobody waiting, whatever they belong to."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvd import foreign, limits
from tests.support.closing import threads, wait_until_closed
from tests.support.lingering import DeafFileSystem, lingering_socket


@pytest.fixture(autouse=True)
def _all_closed() -> Iterator[None]:
    yield
    wait_until_closed()
    assert threads() == []
    assert foreign._owners == {}


def closed_by(uid: int) -> bool:
    """Whether a pipe that this user passed is closed."""
    ours, theirs = os.pipe()
    foreign.close_of(uid, theirs)
    os.set_blocking(ours, False)
    for thread in threads():
        thread.join(0.2)
    try:
        return os.read(ours, 1) == b""
    except BlockingIOError:
        return False
    finally:
        os.close(ours)


def test_a_socket_that_lingers_keeps_neither_us_nor_other_users_waiting() -> None:
    with lingering_socket() as stuck:
        foreign.close_of(7, stuck)
        assert not closed_by(7)
        assert foreign.waiting(7) == 2
        assert closed_by(8)
        assert foreign.waiting(8) == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a file system takes root")
def test_neither_does_a_file_system_that_does_not_answer_and_its_files_tell_what_they_are(tmp_path: Path) -> None:
    deaf = DeafFileSystem(tmp_path)
    try:
        assert foreign.kind(deaf.descriptor) == (stat.S_IFREG, 0)
        foreign.close_of(7, deaf.descriptor)
        assert not closed_by(7)
        assert closed_by(8)
    finally:
        deaf.close()


def test_our_own_descriptors_and_those_that_were_kept_are_closed_at_once() -> None:
    ours, theirs = os.pipe()
    foreign.received(7, [theirs])
    foreign.kept(theirs)
    foreign.close([theirs])
    assert os.read(ours, 1) == b""
    os.close(ours)
    assert threads() == []


def test_users_beyond_the_bound_share_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_CLOSING_USERS", 1)
    with lingering_socket() as one, lingering_socket() as two:
        foreign.close_of(7, one)
        foreign.close_of(8, two)
        assert not closed_by(9)
        assert len(threads()) == 2


def test_the_kind_of_a_device_has_its_number(tmp_path: Path) -> None:
    descriptor = os.open("/dev/null", os.O_RDONLY)
    assert foreign.kind(descriptor) == (stat.S_IFCHR, os.makedev(1, 3))
    os.close(descriptor)
    with pytest.raises(OSError, match="Bad file descriptor"):
        foreign.kind(descriptor)
