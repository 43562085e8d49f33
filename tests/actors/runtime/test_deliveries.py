"""How many calls wait in mailboxes for one pull over a network, in the daemons of both sides together."""

import pytest

from kvd.actors.runtime.actor import name_of
from kvd.protocol.worker import Done, Released
from tests.actors.runtime.test_spans import Pair

MOST = 14


class Counted(Pair):
    """`delivered` has the daemon, the actor and the method of each call."""

    def __init__(self):
        super().__init__()
        self.delivered = []
        for name, stage in (("consumer", self.consumer), ("producer", self.producer)):
            stage.context.spans = None
            self._count(name, stage.context.dispatcher)

    def _count(self, daemon, dispatcher):
        put = dispatcher.put

        def counted(actor, method, arguments):
            self.delivered.append((daemon, actor.name, name_of(method)))
            put(actor, method, arguments)

        dispatcher.put = counted

    def serve(self, name, blocks):
        ticket = self.offer()
        self.delivered.clear()
        self.pull(ticket, name, blocks)
        self.land()


@pytest.fixture
def pair():
    pair = Counted()
    pair.serve("first", (2, 3))  # with the handshake
    pair.serve("second", (4, 5))
    return pair


def test_a_pull_over_a_network_passes_few_mailboxes(pair):
    assert pair.consumer.notified == [Done("first"), Done("second")]
    assert pair.producer.notified == [Released("o", "read")] * 2
    assert len(pair.delivered) <= MOST, pair.delivered


def test_it_does_not_pass_the_handshake(pair):
    assert "handshake" not in {actor for _, actor, _ in pair.delivered}
