import os

import pytest

from kvd.engines.demo import router as module
from kvd.engines.demo.messages import (
    Decoded,
    DecodeRequest,
    Failed,
    Lines,
    Prefilled,
    Prompt,
    Pulled,
    Ready,
    Released,
    ToDecode,
    ToPrefill,
    line,
)
from kvd.engines.demo.router import CONCURRENT, Request, RequestFailedError, Router
from kvd.processes import ProcessEndedError


class Scripted:
    """A child whose answers a function gives."""

    def __init__(self, name, kinds, answer):
        self.name = name
        self.received = []
        self._lines = Lines(kinds)
        self._answer = answer
        self.source, self._sink = os.pipe()
        self.exit, self._alive = os.pipe()

    def write(self, data):
        for message in self._lines.feed(data):
            self.received.append(message)
            for answer in self._answer(message):
                self.say(answer)

    def say(self, message):
        os.write(self._sink, line(message))

    def die(self):
        os.close(self._alive)
        os.close(self._sink)
        self._alive = self._sink = -1

    def ended(self):
        return ProcessEndedError(f"{self.name} ended")

    def close(self):
        for descriptor in (self.source, self._sink, self.exit, self._alive):
            if descriptor >= 0:
                os.close(descriptor)


def prefill(message):
    return [Prefilled(request=message.request, token=message.tokens[0], ticket=f"ticket of {message.request}")]


def decode(message):
    tokens = list(range(message.token, message.token + message.count))
    return [
        Pulled(request=message.request, blocks=[5], started=1.0, ended=2.0),
        Decoded(request=message.request, tokens=tokens),
    ]


@pytest.fixture
def house():
    """A router between scripted children: (router, prefill, decode, daemon, steps)."""
    steps = []
    children = [
        Scripted("prefill-engine", ToPrefill, prefill),
        Scripted("decode-engine", ToDecode, decode),
        Scripted("daemon", ToPrefill, prefill),
    ]
    router = Router(children[0], children[1], children[2:], steps.append)
    yield router, *children, steps
    router.close()
    for child in children:
        child.close()


def release_what_was_decoded(prefill_engine):
    def answer(message):
        prefill_engine.say(Released(request=message.request, reasons=["read"]))
        return decode(message)

    return answer


def test_a_request_goes_from_prefill_to_decode_and_comes_back_with_its_tokens(house):
    router, prefill_engine, decode_engine, _, steps = house
    decode_engine._answer = release_what_was_decoded(prefill_engine)
    request = Request("r", [40, 41])
    router.run([request], 3)
    assert prefill_engine.received == [Prompt(request="r", tokens=[40, 41])]
    assert decode_engine.received == [
        DecodeRequest(request="r", prompt_tokens=2, token=40, count=3, ticket="ticket of r")
    ]
    assert request == Request("r", [40, 41], "ticket of r", [5], 1.0, 2.0, [40, 41, 42], ["read"])
    assert steps == ["prefilled", "pulled", "decoded"]


def test_no_more_requests_than_the_bound_are_under_way(house):
    router, prefill_engine, decode_engine, _, steps = house
    under_way = []

    def answer(message):
        under_way.append(len(prefill_engine.received) - steps.count("decoded"))
        prefill_engine.say(Released(request=message.request, reasons=["read"]))
        return decode(message)

    decode_engine._answer = answer
    requests = [Request(str(index), [index]) for index in range(4 * CONCURRENT)]
    router.run(requests, 2)
    assert all(request.tokens for request in requests)
    assert max(under_way) == CONCURRENT


def test_starting_waits_for_both_engines(house):
    router, prefill_engine, decode_engine, _, _ = house
    prefill_engine.say(Ready())
    decode_engine.say(Ready())
    router.start()


def test_a_run_goes_on_until_the_offer_was_released(house, monkeypatch):
    monkeypatch.setattr(module, "SILENCE_SECONDS", 0.05)
    router = house[0]
    with pytest.raises(RequestFailedError, match=r"nothing happened for 0 s; open: \['r'\]"):
        router.run([Request("r", [1])], 2)


def test_a_failed_request_fails_the_run_with_its_reason(house):
    router, _, decode_engine, _, _ = house
    decode_engine._answer = lambda message: [Failed(request=message.request, text="deadline: 30 s passed")]
    with pytest.raises(RequestFailedError, match="r: deadline: 30 s passed"):
        router.run([Request("r", [1])], 2)


@pytest.mark.parametrize("dead", [1, 2, 3])
def test_the_death_of_any_process_fails_the_run_at_once(house, dead):
    router, child = house[0], house[dead]
    child.die()
    with pytest.raises(ProcessEndedError, match=f"{child.name} ended"):
        router.start()
