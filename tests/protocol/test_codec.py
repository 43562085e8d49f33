"""Every message comes back as it went in; anything else is a message or a `BadRequest`."""

from collections.abc import Callable
from types import UnionType
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import inspect

from kvd import limits
from kvd.errors import BadRequest, ErrorCode
from kvd.protocol import codec, peer, worker
from kvd.protocol.codec import Decoder
from kvd.protocol.types import Message, Span

SOCKETS: dict[str, tuple[Decoder[Any], UnionType]] = {
    "worker requests": (codec.worker_requests, worker.Request),
    "worker replies": (codec.worker_replies, worker.Reply),
    "session requests": (codec.session_requests, worker.SessionRequest),
    "session replies": (codec.session_replies, worker.SessionReply),
    "peer requests": (codec.peer_requests, peer.PeerRequest),
    "peer replies": (codec.peer_replies, peer.PeerReply),
}

LETTERS = 'aZ09 \x00\n"\\é中😀'
"""Enough to be wrong about; drawing from all of Unicode costs seconds."""


def _integers(info: inspect.IntType) -> st.SearchStrategy[int]:
    highest = info.le if info.le is not None else (info.lt or 1 << 63) - 1
    return st.integers(info.ge or 0, highest)


def _text(info: inspect.StrType) -> st.SearchStrategy[str]:
    if info.pattern is not None:
        return st.from_regex(info.pattern, fullmatch=True).filter(lambda text: len(text) <= info.max_length)
    return st.text(LETTERS, min_size=info.min_length or 0, max_size=20)


VALUES: dict[type, Callable[[Any], st.SearchStrategy[Any]]] = {
    inspect.Metadata: lambda info: values(info.type),
    inspect.NoneType: lambda _: st.none(),
    inspect.BoolType: lambda _: st.booleans(),
    inspect.IntType: _integers,
    inspect.FloatType: lambda info: st.floats(info.ge, info.le),
    inspect.BytesType: lambda info: st.binary(min_size=info.min_length or 0, max_size=min(info.max_length or 64, 64)),
    inspect.StrType: _text,
    inspect.VarTupleType: lambda info: st.lists(values(info.item_type), min_size=info.min_length or 0, max_size=4).map(
        tuple
    ),
    inspect.StructType: lambda info: messages(info.cls),
    inspect.UnionType: lambda info: st.one_of([values(one) for one in info.types]),
}


def values(info: Any) -> st.SearchStrategy[Any]:
    """Values that a field's type allows: its bounds are read from the type, so that new messages are covered."""
    return VALUES[type(info)](info)


def messages(kind: type[Message]) -> st.SearchStrategy[Message]:
    fields = inspect.type_info(kind).fields
    return st.builds(kind, **{field.name: values(field.type) for field in fields})


def kinds() -> list[tuple[str, type[Message]]]:
    return [(socket, kind) for socket, (_, union) in SOCKETS.items() for kind in get_args(union)]


@pytest.mark.parametrize(("socket", "kind"), kinds(), ids=lambda value: getattr(value, "__name__", None))
def test_every_message_comes_back_as_it_went_in(socket: str, kind: type[Message]) -> None:
    decoder, _ = SOCKETS[socket]

    @settings(max_examples=20, deadline=None)
    @given(messages(kind))
    def check(message: Message) -> None:
        assert decoder.decode(codec.encode(message)) == message

    check()


@pytest.mark.parametrize("socket", SOCKETS)
def test_random_bytes_are_a_message_or_a_bad_request(socket: str) -> None:
    decoder, union = SOCKETS[socket]

    @settings(deadline=None)
    @given(st.binary(max_size=200))
    def check(frame: bytes) -> None:
        try:
            message = decoder.decode(frame)
        except BadRequest as error:
            code = error.code
        else:
            assert isinstance(message, union)
            return
        assert code is ErrorCode.BAD_MESSAGE

    check()


@pytest.mark.parametrize(("socket", "kind"), kinds(), ids=lambda value: getattr(value, "__name__", None))
def test_a_damaged_message_is_a_message_or_a_bad_request(socket: str, kind: type[Message]) -> None:
    decoder, union = SOCKETS[socket]

    @settings(max_examples=20, deadline=None)
    @given(messages(kind), st.data())
    def check(message: Message, data: st.DataObject) -> None:
        frame = bytearray(codec.encode(message))
        place = data.draw(st.integers(0, len(frame) - 1))
        frame[place] = data.draw(st.integers(0, 255))
        cut = data.draw(st.integers(0, len(frame)))
        try:
            decoded = decoder.decode(bytes(frame[:cut]))
        except BadRequest:
            return
        assert isinstance(decoded, union)

    check()


@pytest.mark.parametrize("socket", SOCKETS)
def test_messages_of_other_sockets_are_refused(socket: str) -> None:
    decoder, _ = SOCKETS[socket]
    foreign = worker.Detached() if socket != "session replies" else worker.Detach()
    with pytest.raises(BadRequest) as caught:
        decoder.decode(codec.encode(foreign))
    assert caught.value.code is ErrorCode.BAD_MESSAGE


@pytest.mark.parametrize("socket", SOCKETS)
def test_a_frame_above_the_bound_is_refused_by_its_size(socket: str) -> None:
    with pytest.raises(BadRequest, match=f"the bound is {limits.MAX_MESSAGE_BYTES}") as caught:
        SOCKETS[socket][0].decode(bytes(limits.MAX_MESSAGE_BYTES + 1))
    assert caught.value.code is ErrorCode.TOO_LARGE


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(BadRequest):
        codec.worker_requests.decode(b"\x91" * 100_000)


def test_values_outside_their_bounds_are_refused() -> None:
    span, secret = Span(0, 0, b"\x00" * 4), bytes(16)
    for message in (
        worker.Offer(1, "o", 1, (span,), 1.0, b""),
        worker.Offer(1, "o", 1, (span,), 1.0, bytes(17)),
        worker.Offer(1, "o", 1, (span,), 1.0, secret, -1),
        worker.Offer(1, "o", 1, (span,), 1.0, secret, limits.MAX_CONSUMERS + 1),
        worker.Offer(-1, "o", 1, (span,), 1.0, secret),
        worker.Offer(1, "", 1, (span,), 1.0, secret),
        worker.Offer(1, "o" * (limits.MAX_REQUEST_ID_BYTES + 1), 1, (span,), 1.0, secret),
        worker.Offer(1, "o", 1, (Span(limits.MAX_GROUPS, 0, b""),), 1.0, secret),
        worker.Offer(1, "o", 1, (Span(0, 0, bytes(4 * limits.MAX_BLOCKS_PER_REQUEST + 4)),), 1.0, secret),
        worker.Offer(1, "o", 1, (span,) * (limits.MAX_GROUPS + 1), 1.0, secret),
        worker.Offer(1, "o", 1, (span,), float("nan"), secret),
        worker.Offer(1, "o", 1, (span,), float("inf"), secret),
        worker.Offer(1, "o", 1, (span,), 3600.5, secret),
    ):
        with pytest.raises(BadRequest) as caught:
            codec.worker_requests.decode(codec.encode(message))
        assert caught.value.code is ErrorCode.BAD_MESSAGE


def test_a_newline_at_the_end_of_a_name_is_refused() -> None:
    assert codec.peer_requests.decode(codec.encode(peer.Hello("decode-7", 1))) == peer.Hello("decode-7", 1)
    with pytest.raises(BadRequest, match="matching regex"):
        codec.peer_requests.decode(codec.encode(peer.Hello("decode-7\n", 1)))


@pytest.mark.parametrize(("socket", "kind"), kinds(), ids=lambda value: getattr(value, "__name__", None))
def test_an_element_that_a_later_version_appends_is_ignored(socket: str, kind: type[Message]) -> None:
    decoder, _ = SOCKETS[socket]

    @settings(max_examples=5, deadline=None)
    @given(messages(kind))
    def check(message: Message) -> None:
        elements = msgspec.msgpack.decode(codec.encode(message))
        assert decoder.decode(msgspec.msgpack.encode([*elements, {"a later": "field"}])) == message

    check()


@pytest.mark.parametrize(("socket", "kind"), kinds(), ids=lambda value: getattr(value, "__name__", None))
def test_appended_fields_that_an_earlier_version_leaves_out_have_their_defaults(
    socket: str, kind: type[Message]
) -> None:
    decoder, _ = SOCKETS[socket]
    fields = inspect.type_info(kind).fields
    required = [field for field in fields if field.required]

    @settings(max_examples=5, deadline=None)
    @given(messages(kind))
    def check(message: Message) -> None:
        elements = msgspec.msgpack.decode(codec.encode(message))[: 1 + len(required)]
        defaults = {field.name: field.default for field in fields if not field.required}
        assert decoder.decode(msgspec.msgpack.encode(elements)) == msgspec.structs.replace(message, **defaults)

    assert [field.name for field in fields[: len(required)]] == [field.name for field in required]
    check()
