"""Cores that are dealt out, and what a thread is after it settled, as the kernel tells it."""

import ctypes
import errno
import os
import platform
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.transport import threads
from kvd.transport.threads import Place, _Attributes, deal_cores, settle

SCHED_GETATTR = {"x86_64": 315, "aarch64": 275}


@given(cores=st.sets(st.integers(0, 1023), min_size=1, max_size=64), count=st.integers(1, 16))
def test_each_thread_gets_cores_and_none_that_another_has_where_there_are_enough(cores: set[int], count: int) -> None:
    hands = deal_cores(cores, count)
    assert len(hands) == count
    assert all(hands)
    assert frozenset().union(*hands) == cores
    if count <= len(cores):
        assert sum(map(len, hands)) == len(cores)
        assert max(map(len, hands)) - min(map(len, hands)) <= 1


def test_both_threads_of_a_core_fall_into_one_set() -> None:
    assert deal_cores(range(8), 2) == [{0, 2, 4, 6}, {1, 3, 5, 7}]  # 0 and 4, 1 and 5, ... are siblings


def on_a_thread(call: Callable[[], Any]) -> Any:
    """What `call` returns or raises on a thread of its own, which ends with it."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(call())
        except OSError as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return outcome[0]


def settled(niceness: int) -> tuple[int, _Attributes]:
    settle(niceness)
    attributes = _Attributes()
    number = SCHED_GETATTR[platform.machine()]
    assert ctypes.CDLL(None).syscall(number, 0, ctypes.byref(attributes), ctypes.sizeof(attributes), 0) == 0
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id()), attributes


@pytest.mark.skipif(platform.machine() not in SCHED_GETATTR, reason="no number of sched_getattr for this machine")
def test_a_thread_is_nicer_and_lets_others_go_first() -> None:
    mine = os.getpriority(os.PRIO_PROCESS, 0)
    nice, attributes = on_a_thread(lambda: settled(3))
    assert nice == mine + 3
    assert (attributes.policy, attributes.nice) == (os.SCHED_OTHER, nice)
    if tuple(map(int, platform.release().split(".")[:2])) >= (6, 12):
        assert attributes.runtime == 100_000_000
    assert os.getpriority(os.PRIO_PROCESS, 0) == mine


def test_a_kernel_that_refuses_it_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_SCHED_SETATTR", {platform.machine(): 4095})
    refused = on_a_thread(lambda: settle(0))
    assert isinstance(refused, OSError)
    assert (refused.errno, "sched_setattr" in str(refused)) == (errno.ENOSYS, True)


def places(cores: set[int], *copies: bool) -> list[set[int]]:
    """Where a thread with these cores may run: at first, then as it begins or ends to copy."""
    place = Place(cores)
    found = [os.sched_getaffinity(0)]
    for copying in copies:
        place.keep(copies=copying)
        found.append(os.sched_getaffinity(0))
    return found


def test_a_thread_keeps_to_its_cores_only_while_it_copies() -> None:
    anywhere = os.sched_getaffinity(0)
    mine = {min(anywhere)}
    assert on_a_thread(lambda: places(mine, True, True, False, True)) == [anywhere, mine, mine, anywhere, mine]
    assert on_a_thread(lambda: places(set(), True, False)) == [anywhere] * 3
    assert os.sched_getaffinity(0) == anywhere


def test_cores_that_the_kernel_refuses_are_told_of_before_anything_is_copied() -> None:
    assert isinstance(on_a_thread(lambda: places({4095})), OSError)
