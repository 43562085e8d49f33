"""The loops of the two engines, over a daemon that is a copy between two lists of buffers."""

from collections import deque

import pytest

from kvd import client
from kvd.engines.demo.decode import DecodeEngine
from kvd.engines.demo.messages import Decoded, DecodeRequest, Failed, Prefilled, Prompt, Pulled, Released, Stop
from kvd.engines.demo.prefill import PrefillEngine
from kvd.engines.demo.workload import make_prompts
from tests.engines.demo.sides import copy_tokens, generate_by_recomputation, make_side

COUNT = 4


class Kv:
    """What `AttachedEngine` is to the loops; whatever happens, happens when the test says so."""

    def __init__(self, side):
        self.engine = side.engine
        self.blocks = side.blocks
        self.ranks = len(side.ranks)
        self.offers = {}
        self.pulls = {}
        self.told = []

    def offer(self, request, tokens, table):
        self.offers[request] = table
        return f"ticket of {request}"

    def pull(self, request, text, tokens, table):
        self.pulls[request] = (tokens, table)

    def poll(self, timeout):
        told, self.told = self.told, []
        return told


class Script:
    """A channel on which each look for messages runs the next step of a test; after the last one comes `Stop`."""

    def __init__(self, *steps):
        self._steps = deque(steps)
        self.sent = []

    def receive(self, timeout):
        if not self._steps:
            return [Stop()]
        return self._steps.popleft()() or []

    def send(self, message):
        self.sent.append(message)


@pytest.fixture
def prompts():
    return make_prompts(3, 16, 1024, seed=0)  # 64, 1 and 8 tokens


def test_the_prefill_engine_answers_a_prompt_with_its_first_token_and_a_ticket(model, prompts):
    kv = Kv(make_side(model))
    script = Script(
        lambda: [Prompt(request="r", tokens=prompts[2])],
        lambda: None,
        lambda: kv.told.append(client.Released(offer="r", reason="read")),
    )
    PrefillEngine(kv, script).run()
    (token,) = generate_by_recomputation(model, prompts[2], 1)
    assert script.sent == [
        Prefilled(request="r", token=token, ticket="ticket of r"),
        Released(request="r", reasons=["read"]),
    ]
    assert kv.blocks.can_allocate(256)


def test_offered_blocks_are_used_again_only_after_every_rank_was_released(model, prompts):
    kv = Kv(make_side(model, tp=2, capacity=64))  # holds the first prompt, and nothing beside it

    def nothing_yet():
        assert [message.request for message in script.sent] == ["first"]
        assert list(kv.offers) == ["first"]

    def release(request, ranks=1):
        kv.told.extend([client.Released(offer=request, reason="read")] * ranks)

    script = Script(
        lambda: [Prompt(request="first", tokens=prompts[0]), Prompt(request="second", tokens=prompts[1])],
        nothing_yet,
        lambda: release("first"),
        nothing_yet,
        lambda: release("first"),
        lambda: None,
        lambda: release("second", ranks=2),
    )
    PrefillEngine(kv, script).run()
    assert [type(message) for message in script.sent] == [Prefilled, Released, Prefilled, Released]


def test_the_decode_engine_decodes_what_was_pulled_into_its_blocks(model, prompts):
    source, target = make_side(model), make_side(model, tp=2)
    prompt = prompts[2]
    table = source.blocks.allocate("r", len(prompt))
    first = source.engine.prefill(prompt, table)
    kv = Kv(target)

    def arrive(rank):
        if rank:
            assert script.sent == []
        tokens, here = kv.pulls["r"]
        copy_tokens(source, table, target, here, tokens)
        kv.told.append(client.Done(request="r"))

    script = Script(
        lambda: [DecodeRequest(request="r", prompt_tokens=len(prompt), token=first, count=COUNT, ticket="t")],
        lambda: arrive(0),
        lambda: arrive(1),
    )
    DecodeEngine(kv, script).run()
    pulled, decoded = script.sent
    assert isinstance(pulled, Pulled)
    assert pulled.blocks == kv.pulls["r"][1][:1]
    assert pulled.started <= pulled.ended
    assert decoded == Decoded(request="r", tokens=generate_by_recomputation(model, prompt, COUNT))
    assert kv.blocks.can_allocate(256)


def test_a_handover_waits_until_there_are_blocks_for_its_prompt_and_its_tokens(model):
    kv = Kv(make_side(model, capacity=64))
    handovers = [
        DecodeRequest(request=name, prompt_tokens=32, token=1, count=COUNT, ticket="t") for name in ("first", "second")
    ]

    def first_only():
        assert list(kv.pulls) == ["first"]
        zero(kv.pulls["first"])
        kv.told.append(client.Done(request="first"))

    def zero(pull):
        for keys, values in kv.engine.ranks[0].layers.values():
            keys[pull[1]] = values[pull[1]] = 0.0

    def second():
        zero(kv.pulls["second"])
        kv.told.append(client.Done(request="second"))

    script = Script(lambda: handovers, first_only, *[lambda: None] * COUNT, second)
    DecodeEngine(kv, script).run()
    assert [message.request for message in script.sent if isinstance(message, Decoded)] == ["first", "second"]


def test_a_failed_pull_is_told_with_its_reason_and_its_blocks_stay_held(model):
    kv = Kv(make_side(model))

    def fail():
        kv.told.append(client.Failed(request="r", code="deadline", text="late", quarantined=True, blocks=()))

    def look():
        assert script.sent == [Failed(request="r", text="deadline: late")]
        assert not kv.blocks.can_allocate(256)
        raise EOFError

    script = Script(lambda: [DecodeRequest(request="r", prompt_tokens=8, token=1, count=COUNT, ticket="t")], fail, look)
    with pytest.raises(EOFError):
        DecodeEngine(kv, script).run()
