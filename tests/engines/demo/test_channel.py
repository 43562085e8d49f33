import os

import msgspec
import pytest

from kvd.engines.demo.messages import (
    Channel,
    Decoded,
    DecodeRequest,
    Failed,
    FromEngine,
    Lines,
    Prefilled,
    Prompt,
    Pulled,
    Ready,
    Released,
    Stop,
    ToDecode,
    ToPrefill,
    line,
)

FROM_ENGINE = [
    Ready(),
    Failed(request="r", text="deadline: late\nand more"),
    Prefilled(request="r", token=7, ticket="kvd1.x"),
    Released(request="r", reasons=["read", "expired"]),
    Pulled(request="r", blocks=[3, 1], started=1.5, ended=2.5),
    Decoded(request="r", tokens=[7, 8]),
]


@pytest.fixture
def pipe():
    source, sink = os.pipe()
    yield source, sink
    for descriptor in (source, sink):
        try:
            os.close(descriptor)
        except OSError:
            continue


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_messages_are_read_whole_however_the_pipe_cuts_them(chunk):
    data = b"".join(line(message) for message in FROM_ENGINE)
    lines = Lines(FromEngine)
    read = [message for at in range(0, len(data), chunk) for message in lines.feed(data[at : at + chunk])]
    assert read == FROM_ENGINE


def test_an_engine_takes_only_the_messages_that_are_for_it():
    decode_request = DecodeRequest(request="r", prompt_tokens=3, token=1, count=2, ticket="kvd1.x")
    assert Lines(ToDecode).feed(line(decode_request) + line(Stop())) == [decode_request, Stop()]
    with pytest.raises(msgspec.ValidationError):
        Lines(ToPrefill).feed(line(decode_request))


def test_receiving_returns_when_there_is_a_message_and_when_there_is_none(pipe):
    source, sink = pipe
    channel = Channel(ToPrefill, source=source, sink=sink)
    assert channel.receive(0.0) == []
    channel.send(Prompt(request="r", tokens=[1, 2]))
    assert channel.receive(30.0) == [Prompt(request="r", tokens=[1, 2])]


def test_an_engine_learns_that_the_router_is_gone(pipe):
    source, sink = pipe
    os.close(sink)
    with pytest.raises(EOFError):
        Channel(ToPrefill, source=source, sink=sink).receive(30.0)
