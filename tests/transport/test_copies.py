"""When reads of several slices end, and what is believed of a process that has ended."""

import os
import queue
import socket
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from kvd import limits
from kvd.plan import Descriptors
from kvd.transport.interface import Landed, ReadRequest
from kvd.transport.samehost.copies import CopyThreads, Memory, Read
from kvd.transport.samehost.process_memory import ProcessMemory
from tests.support.patience import PATIENCE

LISTENER = """
import socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
print(flush=True)
sys.stdin.read()
"""


def read_of(number: int, slices: int, copy) -> Read:
    count = slices * limits.SLICE_DESCRIPTORS
    offsets = np.arange(count, dtype=np.uint64)
    descriptors = Descriptors(offsets, offsets, np.ones(count, dtype=np.uint64))
    memory = Memory(0, count)
    return Read(ReadRequest(number, "peer", 0, 0, descriptors), memory, memory, lambda _address: 0, copy)


def test_a_read_ends_only_when_no_thread_copies_a_slice_of_it():
    entered, ended, let_go = queue.Queue(), queue.Queue(), [threading.Event(), threading.Event()]

    def copy(_target, source, _length):
        piece = int(source[0]) // limits.SLICE_DESCRIPTORS
        entered.put(piece)
        assert let_go[piece].wait(PATIENCE)

    threads = CopyThreads(2, ended.put)
    threads.start()
    try:
        threads.add(read_of(1, 2, copy))
        assert {entered.get(timeout=PATIENCE) for _ in let_go} == {0, 1}
        threads.add(read_of(2, 1, lambda *_: None))
        let_go[1].set()  # its thread notes that it is ready, and goes on with the other read
        first = ended.get(timeout=PATIENCE)
        let_go[0].set()
        second = ended.get(timeout=PATIENCE)
    finally:
        for each in let_go:
            each.set()
        threads.stop()
    assert [(type(event), event.read) for event in (first, second)] == [(Landed, 2), (Landed, 1)]


@pytest.mark.real
def test_what_was_read_under_the_number_of_a_process_that_has_ended_is_not_believed(tmp_path: Path):
    path = str(tmp_path / "listener")
    process = subprocess.Popen(
        [sys.executable, "-c", LISTENER, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with socket.socket(socket.AF_UNIX) as connected:
        process.stdout.readline()
        connected.connect(path)
        memory = ProcessMemory(connected)
        process.communicate()
    value = np.array([7], dtype=np.uint64)
    memory._pid = os.getpid()  # another process has its number by now, and something lies at the address
    with pytest.raises(ProcessLookupError, match="the process has ended"):
        memory.read(value.ctypes.data, value.nbytes)
    memory.close()
