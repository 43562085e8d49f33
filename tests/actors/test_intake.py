"""A worker and a peer send without a pause: their frames wait outside the actors."""

import pytest

from kvd import limits
from kvd.net.interface import PeerAsked, WorkerFrame
from kvd.protocol import codec
from kvd.protocol.peer import Fence
from kvd.protocol.types import Span
from kvd.protocol.worker import Cancel, Offer, Offered, StatusRequest
from tests.actors.lone import Lone
from tests.simulator.virtual.network import UID

FRAMES = 70_000


@pytest.mark.parametrize("frame", [codec.encode(Cancel(1, "nothing")), codec.encode(StatusRequest(1)), b""])
def test_a_flood_fills_no_mailbox_and_later_requests_are_served(frame):
    lone = Lone()
    wild, honest = lone.worker("wild"), lone.worker("honest")
    lone.daemon.worker_port.send = lambda session, reply: session == wild or lone._hear(session, _read(reply))
    lone.daemon.peer_port.answer = lambda sender, reply: True
    fence, peers = codec.encode(Fence(1, 1)), lone.daemon.peer_port
    for _ in range(FRAMES):
        lone.daemon.worker_port.on_event(WorkerFrame(wild, frame, UID))
        peers._inbox.put(PeerAsked(b"peer#1", fence))
    lone.world.loop.call_soon(_watch, lone, most := [0])
    lone.say(honest, codec.encode(Offer(1, "o", 16, (Span(0, 0, bytes(4)),), 60.0, bytes(16))))
    assert any(isinstance(message, Offered) for message in lone.heard(honest))
    assert most[0] < 20 * limits.INTAKE_CLOSES


def _read(reply):
    return codec.worker_replies.decode(reply)


def _watch(lone, most):
    daemon = lone.daemon
    most[0] = max(most[0], *(actor.waiting for actor in daemon.actors.all))
    if daemon.context.dispatcher._queue:
        lone.world.loop.call_soon(_watch, lone, most)
