import itertools
import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd import limits
from kvd.client import Offered
from kvd.engines.vllm.metadata import OfferOrder, PullOrder
from kvd.engines.vllm.transfer_params import TransferParams
from kvd.errors import BadRequest, ErrorCode
from kvd.protocol import ticket
from kvd.protocol import worker as wire
from kvd.protocol.peer import Claim, Fence
from kvd.protocol.ticket import Ticket, TicketRank
from kvd.protocol.types import Span
from kvd.protocol.worker import Offer, Pull

SECRET = b"sixteen letters."

names = st.text("abcXYZ019._:@/-", min_size=1, max_size=30)
spans = st.lists(
    st.builds(Span, st.integers(0, 255), st.integers(0, (1 << 32) - 1), st.binary(max_size=40)), max_size=3
).map(tuple)


@st.composite
def tickets(draw: st.DrawFn) -> Ticket:
    blocks = draw(st.lists(spans, min_size=1, max_size=3).map(tuple))
    ranks = st.builds(
        TicketRank,
        daemon=names,
        address=names,
        incarnation=st.integers(0, (1 << 63) - 1),
        pool=names,
        offer=st.text('aZ09 \x00"é中😀', min_size=1, max_size=20),
        blocks=st.integers(0, len(blocks) - 1),
        secret=st.binary(min_size=16, max_size=16),
    )
    return Ticket(draw(st.integers(0, 1 << 40)), draw(st.lists(ranks, min_size=1, max_size=4).map(tuple)), blocks)


@settings(max_examples=50, deadline=None)
@given(tickets())
def test_a_ticket_comes_back_as_it_went_in_and_travels_as_json(original: Ticket) -> None:
    text = original.encode()
    assert text.isascii()
    assert json.loads(json.dumps(text)) == text
    assert ticket.decode(text) == original


@settings(deadline=None)
@given(st.one_of(st.text(), st.text().map("kvd1.".__add__), st.binary().map(lambda raw: "kvd1." + raw.hex())))
def test_random_text_is_a_ticket_or_a_bad_ticket(text: str) -> None:
    code = ErrorCode.BAD_TICKET
    try:
        assert isinstance(ticket.decode(text), Ticket)
    except BadRequest as error:
        code = error.code
    assert code is ErrorCode.BAD_TICKET


@pytest.mark.parametrize("groups", [1, 15, 16, 256])
def test_a_ticket_of_too_many_spans_is_refused_before_they_are_made(
    monkeypatch: pytest.MonkeyPatch, groups: int
) -> None:
    """Each takes memory and a moment of the daemon's loop, and has 6 bytes."""
    rank = TicketRank("d", "tcp://h:1", 1, "p", "o", 0, SECRET)
    monkeypatch.setattr(limits, "MAX_TICKET_SPANS", 512)
    most = 512 // groups
    made = [Ticket(1, (rank,), (tuple(Span(0, 0, b"") for _ in range(groups)),) * count) for count in (most, most + 1)]
    assert ticket.decode(made[0].encode()) == made[0]
    monkeypatch.setattr(ticket, "_decoder", None)
    with pytest.raises(BadRequest, match=f"has {(most + 1) * groups} lists of block ids; at most 512") as caught:
        ticket.decode(made[1].encode())
    assert caught.value.code is ErrorCode.BAD_TICKET


@settings(max_examples=50, deadline=None)
@given(tickets(), st.data())
def test_a_damaged_ticket_is_a_ticket_or_a_bad_ticket(original: Ticket, data: st.DataObject) -> None:
    text = original.encode()
    place = data.draw(st.integers(5, len(text) - 1))
    damaged = (
        text[:place] + data.draw(st.sampled_from(["", "A", "_", "=", "\n", "é", "\ud800", "%"])) + text[place + 1 :]
    )
    code = ErrorCode.BAD_TICKET
    try:
        decoded = ticket.decode(damaged)
    except BadRequest as error:
        code = error.code
    else:
        for rank in decoded.ranks:
            assert isinstance(decoded.spans(rank), tuple)
    assert code is ErrorCode.BAD_TICKET


@pytest.mark.parametrize("text", ["", "kvd1", "kvd2.abc", "KVD1.", "hello"])
def test_another_version_is_named_in_the_error(text: str) -> None:
    with pytest.raises(BadRequest, match=r"a ticket of this version starts with 'kvd1\.'"):
        ticket.decode(text)


@settings(max_examples=30, deadline=None)
@given(st.lists(tickets(), min_size=1, max_size=4))
def test_joined_tickets_name_every_rank_in_order_with_its_own_blocks(parts: list[Ticket]) -> None:
    parts = [
        msgspec.structs.replace(
            part,
            ranks=tuple(msgspec.structs.replace(rank, address=f"tcp://gpu:1#{rank.daemon}") for rank in part.ranks),
        )
        for part in parts
    ]
    texts = [Ticket(7, part.ranks, part.blocks).encode() for part in parts]
    joined = ticket.decode(ticket.join(texts))
    expected = [(rank.daemon, rank.offer, part.spans(rank)) for part in parts for rank in part.ranks]
    assert [(rank.daemon, rank.offer, joined.spans(rank)) for rank in joined.ranks] == expected
    assert len(joined.blocks) == len(set(joined.blocks))


def test_tickets_of_different_requests_do_not_join() -> None:
    rank = TicketRank("d", "a", 1, "p", "o", 0, SECRET)
    texts = [Ticket(tokens, (rank,), ((),)).encode() for tokens in (7, 8)]
    with pytest.raises(BadRequest, match=r"differ in tokens: \[7, 8\]") as caught:
        ticket.join(texts)
    assert caught.value.code is ErrorCode.BAD_TICKET


def ticket_at(daemon: str, address: str) -> str:
    return Ticket(7, (TicketRank(daemon, address, 1, "p", "o", 0, SECRET),), ((),)).encode()


@pytest.mark.parametrize(
    "local", ["tcp://127.0.0.1:7700", "tcp://localhost:7700#" + "0" * 64, "tcp://[::1]:7700", "ipc:///a.peers"]
)
def test_ranks_on_several_hosts_do_not_join_with_an_address_that_only_one_host_reaches(local: str) -> None:
    with pytest.raises(BadRequest, match=r"only its own host reaches; start 'a' with `listen`") as caught:
        ticket.join([ticket_at("a", local), ticket_at("b", "tcp://10.0.0.8:7700")])
    assert caught.value.code is ErrorCode.BAD_TICKET


def test_two_daemons_do_not_join_under_one_address() -> None:
    with pytest.raises(BadRequest, match="both say that they are at"):
        ticket.join([ticket_at("a", "tcp://127.0.0.1:7700"), ticket_at("b", "tcp://127.0.0.1:7700")])


def wide(pool: str, spans: int = 0) -> str:
    """A ticket of as many ranks as one may have, each with so many lists of block ids of its own."""
    ranks = tuple(TicketRank("d", "tcp://h:1", 1, pool, "o", rank, SECRET) for rank in range(limits.MAX_RANKS))
    return Ticket(7, ranks, tuple((Span(0, rank, b""),) * spans for rank in range(len(ranks)))).encode()


def test_tickets_of_more_ranks_than_one_may_have_do_not_join_and_no_more_of_them_are_read() -> None:
    def texts() -> Iterator[str]:
        yield from (wide("p0"), wide("p1"))
        raise AssertionError("a third was read")

    with pytest.raises(BadRequest, match=r"name 2048 ranks, a ticket has 1024 at most") as caught:
        ticket.join(texts())
    assert caught.value.code is ErrorCode.BAD_TICKET


def test_tickets_that_have_too_many_spans_together_do_not_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_TICKET_SPANS", 512)
    ranks = [TicketRank("d", "tcp://h:1", 1, "p", "o", 0, SECRET)]
    texts = [Ticket(1, tuple(ranks), (tuple(Span(0, n, b"") for _ in range(200)),)).encode() for n in range(3)]
    ticket.decode(ticket.join(texts[:2]))
    with pytest.raises(BadRequest, match="has 600 lists of block ids; at most 512"):
        ticket.join(texts)


def test_joining_does_not_compare_every_block_list_with_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def counted(self: Span, other: object) -> bool:
        compared.append(self)
        return isinstance(other, Span) and (self.group, self.first, self.ids) == (other.group, other.first, other.ids)

    text = wide("p0", spans=1)
    monkeypatch.setattr(Span, "__eq__", counted)
    monkeypatch.setattr(Span, "__hash__", lambda self: hash((self.group, self.first, self.ids)))
    assert len(ticket.decode(ticket.join([text])).blocks) == limits.MAX_RANKS
    assert len(compared) < 10 * limits.MAX_RANKS


offers = st.tuples(st.binary(min_size=16, max_size=16), names, names, st.integers(0, 1 << 40), spans)


@settings(max_examples=50, deadline=None)
@given(offers, offers)
def test_a_proof_is_of_the_secret_the_names_and_the_blocks(one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    assert ticket.proof(*one) == ticket.proof(*one)
    for field in range(len(one)):
        changed = (*one[:field], other[field], *one[field + 1 :])
        assert (ticket.proof(*changed) == ticket.proof(*one)) == (changed == one)


def test_where_one_name_ends_and_the_next_begins_is_part_of_the_proof() -> None:
    assert ticket.proof(SECRET, "ab", "c", 1, ()) != ticket.proof(SECRET, "a", "bc", 1, ())


def test_a_stamp_is_of_the_secret_the_generation_and_the_proof() -> None:
    given = itertools.product((SECRET, bytes(16)), (1, 2), (bytes(16), SECRET), (1,))
    assert len({ticket.stamp(*each) >> 64 for each in given}) == 8


@given(st.binary(min_size=16, max_size=16), st.integers(1, (1 << 63) - 1), st.integers(1, (1 << 63) - 1))
def test_no_secret_makes_a_stamp_that_is_also_one_of_another_pool(secret: bytes, generation: int, epoch: int) -> None:
    found = ticket.stamp(secret, generation, bytes(16), epoch)
    assert found & ((1 << 64) - 1) == epoch
    assert 0 < found >> 64 < 1 << 64


@pytest.mark.parametrize(
    "message",
    [
        TicketRank("d", "a", 1, "p", "o", 0, SECRET),
        Ticket(7, (TicketRank("d", "a", 1, "p", "o", 0, SECRET),), ((),)),
        Offer(1, "o", 7, (), 1.0, SECRET),
        Claim(1, "p", "o", 1, 1, SECRET, "c", 0, 1, 1.0),
        Fence(1, 1, Claim(1, "p", "o", 1, 1, SECRET, "c", 0, 1, 1.0)),
        Pull(1, "r", f"kvd1.{SECRET.decode()}", (), 1.0),
        wire.Offered(1, f"kvd1.{SECRET.decode()}"),
        Offered("o", f"kvd1.{SECRET.decode()}"),
        TransferParams(f"kvd1.{SECRET.decode()}", 7),
        OfferOrder("r", "o", 7, (), SECRET),
        PullOrder("r", "p", f"kvd1.{SECRET.decode()}", (), waits=True),
    ],
    ids=lambda message: f"{type(message).__module__}.{type(message).__name__}",
)
def test_what_logs_and_tracebacks_show_of_a_message_gives_no_right_to_read(message: object) -> None:
    assert SECRET.decode() not in repr(message)
    assert SECRET.decode() not in str([message])


def test_a_ticket_that_grows_names_no_blocks_and_is_joined_with_its_like_only() -> None:
    ranks = [
        ticket.growing(daemon="d", address="tcp://h:1", pool=f"prefill.{rank}", offer="r", secret=bytes([rank]) * 16)
        for rank in range(2)
    ]
    joined = ticket.decode(ticket.join(ranks))
    assert (joined.grows, joined.tokens, joined.blocks, len(joined.ranks)) == (True, 0, ((),), 2)
    assert joined.proof(joined.ranks[1]) == ticket.proof(bytes([1]) * 16, "prefill.1", "r", 0, ())
    other = msgspec.structs.replace(joined, grows=False).encode()
    with pytest.raises(BadRequest, match="some tickets of one request are of offers that grow, others are not"):
        ticket.join([ranks[0], other])
    with pytest.raises(BadRequest, match="is of an offer that grows, and names tokens or blocks"):
        ticket.decode(msgspec.structs.replace(joined, tokens=3).encode())
    with pytest.raises(BadRequest, match="the ticket cannot be read"):
        ticket.growing(daemon="", address="tcp://h:1", pool="p", offer="r", secret=bytes(16))
