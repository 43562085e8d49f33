"""Who has served the beginning of a prompt."""

import itertools
import json

from hypothesis import given
from hypothesis import strategies as st

from kvd.router import limits
from kvd.router.affinity import Affinity, Pair
from kvd.router.body import Body
from kvd.router.servers import Servers

(P,), (D, E) = Servers("prefill", ["http://p"]).all, Servers("decode", ["http://d", "http://e"]).all
MESSAGES = st.lists(st.text(max_size=5), max_size=6)


def chat(messages: list[str], model: str = "m") -> tuple[bytes, ...]:
    return Body(json.dumps({"model": model, "messages": messages}).encode()).prefixes


def prompt(text: object) -> tuple[bytes, ...]:
    return Body(json.dumps({"model": "m", "prompt": text}).encode()).prefixes


@given(MESSAGES, MESSAGES, MESSAGES)
def test_chats_share_exactly_the_hashes_of_their_common_messages(common, one, other) -> None:
    first, second = chat(common + one), chat(common + other)
    pairs = zip(common + one, common + other, strict=False)
    until = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    assert first[:until] == second[:until]
    assert not set(first[until:]) & set(second[until:])


def test_the_hash_of_a_chat_is_of_its_model_too() -> None:
    assert not set(chat(["a"])) & set(chat(["a"], model="n"))


def test_long_prompts_share_their_beginnings_up_to_a_power_of_two() -> None:
    first, second = prompt("x" * 5000 + "a"), prompt("x" * 5000 + "b" * 9000)
    assert first == second[: len(first)]
    assert len(first) == 5
    assert len(prompt([17] * 1000)) == 4
    assert prompt("short") == ()


def test_the_longest_known_beginning_decides() -> None:
    affinity = Affinity()
    affinity.learn([b"1"], Pair(P, D))
    affinity.learn([b"1", b"2"], Pair(P, E))
    affinity.learn([b"1"], Pair(P, D))
    assert affinity.find([b"1", b"2", b"3"]) == Pair(P, E)
    assert affinity.find([b"1", b"x"]) == Pair(P, D)
    assert affinity.find([b"x"]) is None


def test_the_oldest_beginnings_are_forgotten() -> None:
    affinity = Affinity(capacity=10)
    for number in range(100):
        affinity.learn([b"%d" % number], Pair(P, D))
    assert len(affinity) == 10
    assert affinity.find([b"99"]) is not None


def test_a_chat_of_very_many_messages_is_known_by_powers_of_two_of_its_bytes() -> None:
    first, second = chat(["x"] * 5000 + ["a"]), chat(["x"] * 5000 + ["b"] * 9000)
    assert first == second[: len(first)]
    assert len(first) == 7


def test_a_chat_leaves_a_bounded_number_of_hashes() -> None:
    assert len(chat(["a"] * 1000)) == limits.PREFIXES_PER_REQUEST
