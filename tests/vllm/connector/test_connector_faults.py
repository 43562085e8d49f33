"""What vLLM is told when something dies, is late or is wrong: never that bytes are good which are not."""

import copy
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest

pytest.importorskip("vllm.v1", reason="needs vLLM: make test-vllm")

import torch

from tests.vllm.connector.connector_engine import BLOCK_TOKENS, Daemons, Engine

pytestmark = pytest.mark.filterwarnings("default")
PROMPT = list(range(3, 53)) * 2
SOURCE, DESTINATION = [3, 7, 1, 5], [2, 4, 6, 8]


class Pair:
    """A prefill and a decode engine of one rank each."""

    def __init__(self, daemons: Daemons, config: Any, stack: ExitStack) -> None:
        self.daemons, self._config, self._stack = daemons, config, stack
        daemons.start("p", "d")
        self.producer = self.engine("p")
        self.consumer = self.engine("d")

    def engine(
        self, name: str, path: str = "", block_tokens: int = BLOCK_TOKENS, theta: float = 0, **settings: Any
    ) -> Engine:
        settings["socket"] = self.daemons.socket(name)
        config = copy.deepcopy(self._config)
        config.model_config.model = path or config.model_config.model
        if theta:
            config.model_config.hf_text_config.rope_parameters["rope_theta"] = theta
        return self._stack.enter_context(closing(Engine(config, "llama", settings, block_tokens=block_tokens)))

    def offered(self, name: str, consumers: int = 1) -> dict[str, Any]:
        """A finished prefill whose offer the daemon has."""
        params = self.producer.prefilled(name, PROMPT, [SOURCE], consumers)
        self.producer.step()
        return params

    def pulled(self, name: str, params: dict[str, Any]) -> bool:
        """Whether the pull ended well; the blocks are those of the producer then."""
        self.consumer.fill(2)
        self.consumer.decode(name, PROMPT, params, [DESTINATION])
        self.consumer.run_until(lambda: self.producer.step() or name in self.consumer.received)
        return name not in self.consumer.failed

    def same_bytes(self) -> bool:
        return all(
            torch.equal(self.producer.caches[0][name][there], self.consumer.caches[0][name][here])
            for name in self.consumer.caches[0]
            for there, here in zip(SOURCE, DESTINATION, strict=True)
        )


@pytest.fixture
def lost_soon(daemons: Daemons) -> None:
    """Daemons that miss a dead peer after six seconds."""
    daemons.settings["heartbeat"] = "2"


@pytest.fixture
def pair(daemons: Daemons, configurations: Any) -> Iterator[Pair]:
    with ExitStack() as stack:
        made = Pair(daemons, configurations("llama"), stack)
        made.producer.fill(1)
        yield made


def test_a_prefill_engine_that_ends_after_its_offer_is_still_read(pair: Pair) -> None:
    params = pair.offered("r")
    bytes_then = {name: cache.clone() for name, cache in pair.producer.caches[0].items()}
    pair.producer.caches[0].clear()
    pair.producer.workers[0].shutdown()
    pair.consumer.decode("r", PROMPT, params, [DESTINATION])
    pair.consumer.run_until(lambda: "r" in pair.consumer.received)
    assert not pair.consumer.failed
    for name, cache in bytes_then.items():
        for there, here in zip(SOURCE, DESTINATION, strict=True):
            assert torch.equal(cache[there], pair.consumer.caches[0][name][here])


@pytest.mark.usefixtures("lost_soon")
def test_a_dead_prefill_daemon_fails_the_load_and_the_next_one_serves(pair: Pair) -> None:
    params = pair.offered("r1")
    pair.daemons.kill("p")
    assert not pair.pulled("r1", params)
    pair.producer.run_until(lambda: "r1" in pair.producer.sent)
    pair.daemons.start("p")
    pair.producer.run_until(lambda: pair.producer.workers[0]._worker.endpoint.incarnation > 0)
    assert pair.pulled("r2", pair.offered("r2"))
    assert pair.same_bytes()


def test_a_dead_decode_daemon_fails_the_load_and_the_next_one_serves(pair: Pair) -> None:
    params = pair.offered("r1")
    pair.daemons.kill("d")
    assert not pair.pulled("r1", params)
    pair.daemons.start("d")
    pair.consumer.run_until(lambda: pair.consumer.workers[0]._worker._client.connected)
    assert pair.pulled("r2", pair.offered("r2"))
    assert pair.same_bytes()


@pytest.mark.usefixtures("patient")
def test_a_daemon_started_anew_while_the_engine_idles_costs_no_request(pair: Pair) -> None:
    assert pair.pulled("r1", pair.offered("r1"))
    pair.daemons.kill("p")
    pair.daemons.kill("d")
    pair.daemons.start("p", "d")
    assert pair.pulled("r2", pair.offered("r2"))
    assert pair.same_bytes()


def test_blocks_that_were_given_back_and_reused_are_never_taken_for_the_offers(
    daemons: Daemons, configurations: Any
) -> None:
    with ExitStack() as stack:
        pair = Pair(daemons, configurations("llama"), stack)
        pair.producer.close()
        pair.producer = pair.engine("p", offer_ttl=0.2)
        pair.producer.fill(1)
        params = pair.offered("r")
        pair.producer.run_until(lambda: "r" in pair.producer.sent)  # vLLM frees the blocks here
        pair.producer.fill(3)
        assert not pair.pulled("r", params)


def test_a_ticket_of_another_prompt_fails_the_load(pair: Pair) -> None:
    params = pair.offered("r")
    params["kvd_prompt"] += 1
    assert not pair.pulled("r", params)


def test_a_ticket_of_another_prompt_fails_the_load_once_while_the_daemon_is_away(pair: Pair) -> None:
    params = pair.offered("r1")
    params["kvd_prompt"] += 1
    pair.daemons.kill("d")
    assert not pair.pulled("r1", params)
    for _ in range(3):
        pair.consumer.step()  # which fails the test if it reports the request again
    pair.daemons.start("d")
    assert pair.pulled("r2", pair.offered("r2"))
    assert pair.same_bytes()


def test_two_models_of_one_shape_are_refused_by_name_and_a_common_name_makes_them_one(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    pair.consumer.close()
    pair.consumer = pair.engine("d", path="/models/other")
    assert not pair.pulled("r1", pair.offered("r1"))
    assert "model: source has" in caplog.text
    assert "destination has /models/other" in caplog.text
    for side, name in (("producer", "p"), ("consumer", "d")):
        getattr(pair, side).close()
        setattr(pair, side, pair.engine(name, path=f"/{side}/model", model="ours"))
    pair.producer.fill(1)
    assert pair.pulled("r2", pair.offered("r2"))
    assert pair.same_bytes()


def test_keys_that_are_rotated_otherwise_are_refused_with_both_ways(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    pair.consumer.close()
    pair.consumer = pair.engine("d", theta=500000.0)
    assert not pair.pulled("r", pair.offered("r"))
    assert "RoPE: source has " in caplog.text
    assert '"rope_theta": 500000.0' in caplog.text


def test_packed_blocks_of_another_size_are_refused_with_both_sizes(
    pair: Pair, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """VLLM's kernels for AMX pack a block's keys by its size: bytes of another block's would be taken for others."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    for side, name, tokens in (("producer", "p", BLOCK_TOKENS), ("consumer", "d", 2 * BLOCK_TOKENS)):
        getattr(pair, side).close()
        setattr(pair, side, pair.engine(name, block_tokens=tokens))
    assert not pair.pulled("r", pair.offered("r"))
    assert f"packed by {BLOCK_TOKENS} tokens, destination has " in caplog.text
    assert f"packed by {2 * BLOCK_TOKENS} tokens" in caplog.text


def test_an_aborted_request_gives_its_blocks_back(pair: Pair) -> None:
    params = pair.producer.prefilled("r", PROMPT, [SOURCE])  # not offered yet: the pull waits for it
    request = pair.consumer.decode("r", PROMPT, params, [DESTINATION])
    pair.consumer.step()
    keep, answer = pair.consumer.scheduler.request_finished_all_groups(request, (DESTINATION,))
    assert (keep, answer) == (False, None)
    pair.consumer.run_until(lambda: "r" in pair.consumer.received)
    assert not pair.consumer.failed


def test_a_full_prefix_hit_lets_the_producer_free_its_blocks(pair: Pair) -> None:
    prompt = PROMPT[:97]
    params = pair.producer.prefilled("r", prompt, [SOURCE])
    pair.consumer.fill(2)
    before = {name: cache.clone() for name, cache in pair.consumer.caches[0].items()}
    pair.consumer.decode("r", prompt, params, [DESTINATION], computed=96)
    pair.consumer.step()
    pair.producer.run_until(lambda: pair.consumer.step() or "r" in pair.producer.sent)
    assert pair.consumer.received == set()
    assert all(torch.equal(cache, before[name]) for name, cache in pair.consumer.caches[0].items())


def test_a_partial_prefix_hit_keeps_the_blocks_that_are_here(pair: Pair) -> None:
    params = pair.offered("r")
    pair.consumer.fill(2)
    before = {name: cache.clone() for name, cache in pair.consumer.caches[0].items()}
    pair.consumer.decode("r", PROMPT, params, [DESTINATION], computed=64)
    pair.consumer.run_until(lambda: pair.producer.step() or "r" in pair.consumer.received)
    assert not pair.consumer.failed
    for name, cache in pair.consumer.caches[0].items():
        assert torch.equal(cache[DESTINATION[:2]], before[name][DESTINATION[:2]])
        assert torch.equal(cache[DESTINATION[2:]], pair.producer.caches[0][name][SOURCE[2:]])
