"""Garbage on every socket is a message or is answered with an error; nothing raises, and memory does not grow.

`KVD_FUZZ_FRAMES=1000000 python -m pytest -s tests/actors/test_fuzz.py --timeout=0` is the long run, which prints the
memory in use. `KVD_FUZZ_SEED` chooses other frames, to split the run in parts.
"""

import array
import gc
import os
import random
import tracemalloc

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvd.errors import BadRequest, KvdError
from kvd.net.stream import FrameSplitter
from kvd.protocol import codec, peer, ticket, worker
from kvd.protocol.codec import encode
from kvd.protocol.types import Span
from kvd.protocol.worker import Attached, Error, Refused
from tests.actors.lone import SPEC, Lone
from tests.fuzz.messages import garbled
from tests.support.patience import PATIENCE

FRAMES = int(os.environ.get("KVD_FUZZ_FRAMES", "10000"))
SEED = int(os.environ.get("KVD_FUZZ_SEED", "7"))
SPANS = (Span(0, 0, (3).to_bytes(4, "little")),)
RANK = ticket.TicketRank("d1", "sim://d1", 1, "p", "o", 0, bytes(16))
TICKET = ticket.Ticket(16, (RANK,), (SPANS,)).encode()
INFO = peer.PoolInfo("p", 1, bytes(8), 256, SPEC)
SEEDS = {
    "session": [encode(worker.Attach("w", bytes(16), SPEC)), encode(worker.Detach()), encode(worker.End("w"))],
    "worker": [
        encode(worker.Offer(1, "r", 16, SPANS, 5.0, bytes(16))),
        encode(worker.Pull(2, "q", TICKET, SPANS, 1.0)),
        encode(worker.Cancel(3, "r")),
        encode(worker.Acknowledge(1)),
        encode(worker.StatusRequest(4)),
    ],
    "asked": [
        encode(peer.Hello("d1", 1)),
        encode(peer.Claim(1, "w", "r", 0, 0, bytes(16), "c", 0, 2, 5.0)),
        encode(peer.Renew((1, 2))),
        encode(peer.Fence(1, 1)),
        encode(peer.Release(1, finished=True)),
        encode(peer.Ping(1)),
    ],
    "answered": [
        encode(peer.Welcome("d1", 1, "d1#1", b"meta", (INFO,))),
        encode(peer.Grant(1, 1, 1, 1)),
        encode(peer.Refuse(0, "internal", "no")),
        encode(peer.Held(1)),
        encode(peer.Broken((1,), "internal", "no")),
        encode(peer.Pong(1, 1)),
    ],
}


class Fuzzed:
    """A daemon with a worker and a link, which gets garbage on each of its sockets."""

    def __init__(self):
        self.lone = Lone()
        self.session = self.lone.worker("w")
        self.lone.say(self.session, encode(worker.Pull(1, "first", TICKET, SPANS, 3600.0)))
        self.lone.run()
        self.link = min(self.lone.daemon.peer_port.links)

    def feed(self, rng, socket, frame):
        lone = self.lone
        if socket == "session":
            number = lone.connect(rng.choice((1000, 1001)))
            lone.session_frame(number, frame)
            lone.run(0.02)
            assert all(isinstance(each, Refused | Attached) for each in lone.told.pop(number, []))
            lone.hang_up(number)
        elif socket == "worker":
            lone.say(rng.choice((self.session, self.session, b"nobody")), frame)
        elif socket == "asked":
            lone.ask(rng.choice((b"d1#1", b"d2#1")), frame)
        else:
            links = lone.daemon.peer_port.links
            lone.daemon.peer_port.inject_answer(rng.choice(sorted(links)) if links else self.link, frame)

    def settle(self):
        """Lets time pass so that what waits can end; checks that the daemon still answers."""
        self.lone.run(2.0)
        for each in self.lone.told.pop(self.session, []):
            if isinstance(each, worker.Notifications):  # else the daemon keeps what it is bound to keep
                self.lone.say(self.session, encode(worker.Acknowledge(each.first + len(each.items) - 1)))
        self.lone.told.clear()
        self.lone.say(self.session, b"\xc1")
        (answer,) = [each for each in self.lone.heard(self.session) if isinstance(each, Error)]
        assert answer.code == "bad_message"


@pytest.mark.timeout(0 if FRAMES > 10_000 else PATIENCE)
def test_garbage_on_every_socket_of_a_daemon_is_refused_or_understood_and_memory_is_bounded():
    fuzzed, rng = Fuzzed(), random.Random(SEED)  # noqa: S311 - dice, not secrets
    sizes = []
    tracemalloc.start()
    try:
        for number in range(FRAMES):
            socket = ("session", "worker", "asked", "answered")[number % 4]
            fuzzed.feed(rng, socket, garbled(rng, SEEDS[socket]))
            if number % 50 == 49:
                fuzzed.settle()
            if number % (FRAMES // 4) == FRAMES // 4 - 1:
                fuzzed.lone.run(120.0)
                fuzzed.settle()
                gc.collect()
                sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    print(f"{FRAMES} frames of seed {SEED}; MiB after each quarter:", *(f"{size / 2**20:.2f}" for size in sizes))
    assert sizes[-1] - sizes[0] < 4 * 2**20, sizes


DECODERS = {
    "worker requests": codec.worker_requests,
    "worker replies": codec.worker_replies,
    "session requests": codec.session_requests,
    "session replies": codec.session_replies,
    "peer requests": codec.peer_requests,
    "peer replies": codec.peer_replies,
}


@pytest.mark.parametrize("name", DECODERS)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    frame=st.binary(max_size=200)
    | st.recursive(
        st.none() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=9) | st.binary(max_size=9) | st.floats(),
        lambda inner: st.lists(inner, max_size=9) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
        max_leaves=20,
    ).map(msgspec.msgpack.encode)
)
def test_whatever_is_decoded_is_a_message_or_a_bad_request(name, frame):
    try:
        message = DECODERS[name].decode(frame)
    except BadRequest:
        return
    assert codec.encode(message)


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=100) | st.binary(max_size=100).map(lambda raw: "kvd1." + raw.hex()))
def test_whatever_is_no_ticket_is_a_bad_request(text):
    try:
        ticket.decode(text)
    except KvdError as error:
        assert error.code == "bad_ticket"  # noqa: PT017 - reading it is as good an outcome


@settings(max_examples=150, deadline=None)
@given(chunks=st.lists(st.binary(max_size=40), max_size=10))
def test_whatever_is_no_frame_on_a_session_is_a_bad_request(chunks):
    splitter = FrameSplitter()
    try:
        for chunk in chunks:
            splitter.feed(chunk, array.array("i"))
    except BadRequest:
        pass
    finally:
        splitter.close()
