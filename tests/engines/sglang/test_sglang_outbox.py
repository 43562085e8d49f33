"""Messages to engines that cannot be reached, not yet or not any more."""

import socket
from collections.abc import Iterator

import pytest
import zmq

from kvd.engines.sglang import control as outbox_module
from kvd.engines.sglang import messages
from kvd.engines.sglang.control import Outbox, tcp
from kvd.engines.sglang.messages import Abandoned
from kvd.errors import ErrorCode, Unavailable
from tests.support.patience import MOMENT

FIRST, SECOND = (Abandoned(room, b"n" * 16, "aborted") for room in (1, 2))


@pytest.fixture
def outbox() -> Iterator[Outbox]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    made = Outbox(context)
    yield made
    context.destroy(linger=0)


def test_an_engine_that_refused_the_first_connection_hears_what_was_sent_once_it_is_there(outbox: Outbox) -> None:
    with socket.socket() as closed:  # bound, so that nobody else gets the port; who connects is refused
        closed.bind(("127.0.0.1", 0))
        engine = closed.getsockname()
        outbox.send(engine, FIRST)
        with outbox._sockets[engine].get_monitor_socket(zmq.EVENT_CONNECT_RETRIED) as attempts:
            assert attempts.poll(MOMENT * 1000), "the first connection was the only one"
    with zmq.Context() as context, context.socket(zmq.PULL) as control:
        control.bind("tcp://{}:{}".format(*engine))
        outbox.send(engine, SECOND)
        for sent in (FIRST, SECOND):
            assert control.poll(MOMENT * 1000)
            assert messages.decode(control.recv()) == sent


def test_a_message_that_cannot_be_sent_is_refused_with_the_address(outbox: Outbox) -> None:
    for _ in range(2):
        with pytest.raises(Unavailable, match=r"Abandoned.*cannot be sent to the engine at no host:5: ") as refused:
            outbox.send(("no host", 5), FIRST)
        assert refused.value.code == ErrorCode.PEER_LOST


def test_an_engine_that_runs_for_long_keeps_sockets_to_the_last_engines_alone(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox_module, "MAX_ENGINES", 3)
    engines = [("127.0.0.2", port) for port in range(1, 5)]
    for engine in [*engines[:3], engines[0], engines[3]]:
        outbox.send(engine, FIRST)
    assert list(outbox._sockets) == [engines[2], engines[0], engines[3]]


def test_addresses_of_both_families_have_an_endpoint() -> None:
    assert (tcp("10.0.0.1"), tcp("fd00::1")) == ("tcp://10.0.0.1", "tcp://[fd00::1]")
