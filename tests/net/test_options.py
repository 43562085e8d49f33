import subprocess
import sys
from collections.abc import Iterator

import pytest
import zmq

from kvd import limits
from kvd.net.zmq_socket import TABLE, Kind, apply
from tests.support.patience import PATIENCE


@pytest.mark.parametrize("kind", list(Kind))
def test_every_option_of_a_kind_is_set(kind: Kind) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER if "ROUTER" in kind.name else zmq.DEALER) as socket:
        apply(socket, kind)
        for option, value, kinds, reason in TABLE:
            assert reason
            write_only = option in (zmq.ROUTER_MANDATORY, zmq.ROUTER_HANDOVER)
            if kind in kinds and not write_only:
                assert socket.getsockopt(option) == value, option


def test_no_option_is_set_twice_for_one_kind() -> None:
    for kind in Kind:
        options = [option for option, _, kinds, _ in TABLE if kind in kinds]
        assert len(options) == len(set(options))


@pytest.mark.parametrize("kind", [Kind.PEER_ROUTER, Kind.PEER_DEALER])
def test_what_one_sender_may_leave_unread_in_a_daemon_is_bounded_in_bytes(kind: Kind) -> None:
    values = {option: value for option, value, kinds, _ in TABLE if kind in kinds}
    assert values[zmq.RCVHWM] * values[zmq.MAXMSGSIZE] <= 256 * limits.MIB


UNREAD = """
import sys, zmq
from kvd.net.zmq_socket import Kind, apply

ours_is, theirs_is = (zmq.ROUTER, zmq.DEALER) if "ROUTER" in sys.argv[1] else (zmq.DEALER, zmq.ROUTER)
ours, theirs = zmq.Context().socket(ours_is), zmq.Context().socket(theirs_is)
apply(ours, Kind[sys.argv[1]])
apply(theirs, next(kind for kind in Kind if kind.name.endswith("DEALER" if theirs_is == zmq.DEALER else "ROUTER")))
theirs.setsockopt(zmq.SNDHWM, 0)
ours.bind("tcp://127.0.0.1:0")
theirs.setsockopt(zmq.LINGER, 0)
ours.setsockopt(zmq.LINGER, 0)
theirs.connect(ours.getsockopt_string(zmq.LAST_ENDPOINT))
head = []
if theirs_is == zmq.ROUTER:
    ours.send(b"hello")
    head = theirs.recv_multipart()[:1]
for _ in range(50_000):
    theirs.send_multipart([*head, b"x" * 100])
assert ours.poll(60_000)  # and nobody reads
theirs.poll(500)
theirs.close()
zmq.Context().socket(zmq.PULL).poll(2000)  # longer than a heartbeat of libzmq's was
"""
"""Run in a process of its own, which libzmq's assertions end."""


@pytest.fixture(scope="module")
def unread() -> Iterator[dict[Kind, subprocess.Popen[str]]]:
    """One of each kind, all at once: each does little but wait."""
    started = {
        kind: subprocess.Popen([sys.executable, "-c", UNREAD, kind.name], stderr=subprocess.PIPE, text=True)
        for kind in Kind
    }
    yield started
    for child in started.values():
        child.kill()
        child.communicate()


@pytest.mark.real
@pytest.mark.parametrize("kind", list(Kind))
def test_a_connection_that_hangs_up_while_it_is_not_read_ends_nothing_but_itself(
    unread: dict[Kind, "subprocess.Popen[str]"], kind: Kind
) -> None:
    _, said = unread[kind].communicate(timeout=PATIENCE)
    assert (unread[kind].returncode, said) == (0, "")
