"""What routers carry from the prefill engine to the decode engine."""

import json
import math
import zlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvd.engines.vllm.transfer_params import Prompt, consumers, is_consumer, is_producer, read, write
from kvd.errors import BadRequest
from kvd.protocol.ticket import Ticket, TicketRank

RANK = TicketRank("d", "tcp://h:1", 7, "vllm-0-0", "r#1", 0, bytes(16))
TICKET = Ticket(4, (RANK,), ((),)).encode()


TOKENS = [5, 6, 7, 8, 9]


def prompt(tokens: list[int] | None = None, length: int = 0, **fields: Any) -> Prompt:
    """A prompt of these token ids, or of `length` embeddings alone."""
    return Prompt(length or len(tokens or ()), tokens, **fields)


def refusal(theirs: Prompt, ours: Prompt, tokens: int = 4) -> str:
    """Why the ticket for the first tokens of their prompt is none for ours; empty if it is."""
    ticket = Ticket(tokens, (RANK,), ((),)).encode()
    return read(write(ticket, tokens, theirs), ours).refused


def test_what_one_engine_writes_the_other_reads_after_a_router_has_carried_it_as_json() -> None:
    carried = json.loads(json.dumps(write(TICKET, 4, prompt(TOKENS))))
    assert is_consumer(carried)
    assert not is_producer(carried)
    offered = read(carried, prompt(TOKENS))
    assert (offered.ticket, offered.tokens, offered.refused) == (TICKET, 4, "")


@pytest.mark.parametrize(("consumers", "once"), [(1, True), (2, False), (0, False)])
def test_the_decode_engine_knows_whether_an_offer_ends_with_its_pull(consumers: int, once: bool) -> None:
    assert read(write(TICKET, 4, prompt(TOKENS), consumers), prompt(TOKENS)).once is once


@pytest.mark.parametrize("tokens", [[5, 6, 7, 9, 9], [5, 6, 7], []])
def test_a_ticket_of_another_prompt_is_refused_and_kept_to_let_go_of_its_blocks(tokens: list[int]) -> None:
    offered = read(write(TICKET, 4, prompt(TOKENS)), prompt(tokens))
    assert "mix up" in offered.refused
    assert offered.ticket == TICKET


def test_a_prompt_of_token_ids_alone_has_the_checksum_that_earlier_versions_gave_it() -> None:
    assert prompt([1, 2, 3]).checksum(2) == zlib.crc32(bytes([1, *bytes(7), 2, *bytes(7)]))


CAT, DOG = (("a cat's hash", 1),), (("a dog's hash", 1),)


@pytest.mark.parametrize(
    ("theirs", "ours", "same"),
    [
        ({"media": CAT}, {"media": CAT}, True),
        ({"media": CAT}, {"media": DOG}, False),
        ({"media": CAT}, {"media": ()}, False),
        ({"media": CAT}, {"media": (("a cat's hash", 2),)}, False),
        ({"media": (*CAT, ("a late one", 4))}, {"media": CAT}, True),  # it begins behind what is pulled
        ({"adapter": ("sql", "/a")}, {"adapter": ("sql", "/a")}, True),
        ({"adapter": ("sql", "/a")}, {"adapter": ("sql", "/b")}, False),
        ({"adapter": ("sql", "/a")}, {"adapter": ("chat", "/a")}, False),
        ({"adapter": ("sql", "/a")}, {}, False),
    ],
)
def test_prompts_of_the_same_tokens_are_told_apart_by_their_media_and_their_adapter(
    theirs: dict[str, Any], ours: dict[str, Any], same: bool
) -> None:
    assert bool(refusal(prompt(TOKENS, **theirs), prompt(TOKENS, **ours))) is not same


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [None, TOKENS], ids=["embeddings alone", "tokens as well"])
def test_prompts_of_embeddings_are_told_apart_by_these(dtype: torch.dtype, tokens: list[int] | None) -> None:
    made = torch.arange(15, dtype=dtype).reshape(5, 3)
    other, later = made.clone(), made.clone()
    other[1, 2], later[4, 2] = -1, -1

    def of(embeddings: torch.Tensor) -> Prompt:
        return prompt(tokens, len(embeddings), embeddings=embeddings)

    assert not refusal(of(made), of(made.clone()))
    assert not refusal(of(made), of(later)), "what is behind the tokens that are pulled does not matter"
    assert refusal(of(made), of(other))
    assert refusal(of(made), of(made[:3]))


def test_a_refusal_says_what_both_sides_need_for_the_same_media_and_adapters_to_look_the_same() -> None:
    assert "mm-hasher" not in refusal(prompt(TOKENS), prompt([1, 2, 3, 4]))
    assert "mm-hasher-algorithm" in refusal(prompt(TOKENS, media=CAT), prompt(TOKENS, media=DOG))
    adapter = ("sql", "/adapters/sql")
    assert "sql at /adapters/sql" in refusal(prompt(TOKENS), prompt(TOKENS, adapter=adapter))


def test_a_prompt_has_of_a_request_all_that_its_cache_depends_on() -> None:
    image = SimpleNamespace(identifier="hash", mm_position=SimpleNamespace(offset=3, length=9))
    request = SimpleNamespace(
        num_prompt_tokens=5,
        prompt_token_ids=TOKENS,
        prompt_embeds="embeddings",
        mm_features=[image],
        lora_request=SimpleNamespace(lora_name="sql", lora_path="/a"),
    )
    assert Prompt.of(request) == Prompt(5, TOKENS, "embeddings", (("hash", 3),), ("sql", "/a"))
    assert Prompt.of(request, adapter_paths=False).adapter == ("sql",)


@pytest.mark.parametrize("ticket", [None, 7, "", "kvd1.", "kvd1.ä", "kvd2.AAAA", "x" * 1000])
def test_what_is_no_ticket_is_refused(ticket: object) -> None:
    assert read({"do_remote_prefill": True, "kvd_ticket": ticket, "kvd_prompt": 0}, prompt([1, 2])).refused


NO_NUMBERS = ["x" * 1_000_000, "kvdo1.secret", 10**4000, ["x" * 1_000_000], None]


@pytest.mark.parametrize("sent", NO_NUMBERS)
def test_a_refusal_is_short_whatever_was_sent_as_the_checksum(sent: object) -> None:
    """It is logged, and whoever reaches an engine may send parameters."""
    refused = read({"do_remote_prefill": True, "kvd_ticket": TICKET, "kvd_prompt": sent}, prompt(TOKENS)).refused
    assert "does the router mix up requests?" in refused
    assert len(refused) < 300
    assert "secret" not in refused


@pytest.mark.parametrize("sent", [*NO_NUMBERS, True, -1, 1.5, math.nan])
def test_so_is_it_as_the_number_of_consumers(sent: object) -> None:
    with pytest.raises(BadRequest, match=r"kvd_consumers is .*; it must be from 0") as refused:
        consumers({"do_remote_decode": True, "kvd_consumers": sent})
    assert len(refused.value.text) < 300
    assert "secret" not in refused.value.text


@pytest.mark.parametrize("params", [None, {}, {"do_remote_decode": False, "do_remote_prefill": None}])
def test_a_request_for_one_engine_is_neither(params: dict[str, object] | None) -> None:
    assert not is_producer(params)
    assert not is_consumer(params)
