import contextlib
import os
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd import limits
from kvd.errors import BadRequest, ErrorCode
from kvd.net.stream import HEADER, MAX_DESCRIPTORS, FrameSplitter, pack

contents = st.lists(st.binary(max_size=50), max_size=8)


def is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def null() -> int:
    return os.open("/dev/null", os.O_RDONLY)


@settings(deadline=None)
@given(contents, st.lists(st.integers(0, 500), max_size=10))
def test_frames_come_out_as_they_went_in_however_the_bytes_are_cut(frames: list[bytes], cuts: list[int]) -> None:
    data = b"".join(pack(frame) for frame in frames)
    splitter = FrameSplitter()
    edges = sorted({0, len(data), *(min(cut, len(data)) for cut in cuts)})
    out = [frame for start, end in pairwise(edges) for frame in splitter.feed(data[start:end])]
    assert [frame.content for frame in out] == frames
    assert all(frame.descriptors == () for frame in out)


@settings(deadline=None)
@given(st.lists(st.binary(max_size=100), max_size=10))
def test_random_bytes_are_frames_or_a_bad_request(chunks: list[bytes]) -> None:
    splitter = FrameSplitter()
    with contextlib.suppress(BadRequest):
        for chunk in chunks:
            assert isinstance(splitter.feed(chunk), list)


def test_descriptors_belong_to_the_last_frame_that_begins_in_the_bytes_they_came_with() -> None:
    splitter = FrameSplitter()
    assert splitter.feed(pack(b"first")[:6]) == []
    descriptor = null()
    frames = splitter.feed(pack(b"first")[6:] + pack(b"second"), [descriptor])
    assert frames == [(b"first", ()), (b"second", (descriptor,))]
    os.close(descriptor)


def test_descriptors_wait_for_the_end_of_their_frame() -> None:
    splitter = FrameSplitter()
    descriptor = null()
    assert splitter.feed(pack(b"first") + pack(b"second")[:2], [descriptor]) == [(b"first", ())]
    assert splitter.feed(pack(b"second")[2:]) == [(b"second", (descriptor,))]
    os.close(descriptor)


def test_a_garbage_length_is_refused_and_no_descriptor_stays_open() -> None:
    splitter = FrameSplitter()
    descriptors = [null() for _ in range(3)]
    splitter.feed(b"\x02\x00", descriptors[:1])
    with pytest.raises(BadRequest, match=r"announces 4294967295 bytes") as caught:
        splitter.feed(b"\x00\x00ab" + b"\xff" * 4, descriptors[1:])
    assert caught.value.code is ErrorCode.TOO_LARGE
    assert not any(is_open(descriptor) for descriptor in descriptors)


def test_too_many_frames_at_once_are_refused_and_no_descriptor_stays_open() -> None:
    splitter, descriptor = FrameSplitter(at_once=2), null()
    assert len(splitter.feed(2 * pack(b""))) == 2
    with pytest.raises(BadRequest, match="more than 2 frames at once; wait for the answers"):
        splitter.feed(3 * pack(b""), [descriptor])
    assert not is_open(descriptor)


def test_too_many_descriptors_are_refused_and_closed() -> None:
    splitter = FrameSplitter()
    descriptors = [null() for _ in range(MAX_DESCRIPTORS + 1)]
    splitter.feed(HEADER.pack(10), descriptors[:1])
    with pytest.raises(BadRequest, match="5 descriptors with one frame") as caught:
        splitter.feed(b"x", descriptors[1:])
    assert caught.value.code is ErrorCode.BAD_MESSAGE
    assert not any(is_open(descriptor) for descriptor in descriptors)


def test_descriptors_of_a_frame_that_never_ends_are_closed_with_the_stream() -> None:
    splitter = FrameSplitter()
    descriptor = null()
    splitter.feed(b"\x02", [descriptor])
    splitter.close()
    assert not is_open(descriptor)


def test_a_frame_above_the_bound_is_not_packed() -> None:
    with pytest.raises(BadRequest, match=f"the bound is {limits.MAX_MESSAGE_BYTES}"):
        pack(bytes(limits.MAX_MESSAGE_BYTES + 1))
