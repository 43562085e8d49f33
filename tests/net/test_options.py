import pytest
import zmq

from kvd import limits
from kvd.net.options import TABLE, Kind, apply


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


@pytest.mark.parametrize("kind", [Kind.WORKER_ROUTER, Kind.PEER_ROUTER, Kind.PEER_DEALER])
def test_what_one_sender_may_leave_unread_in_a_daemon_is_bounded_in_bytes(kind: Kind) -> None:
    values = {option: value for option, value, kinds, _ in TABLE if kind in kinds}
    assert values[zmq.RCVHWM] * values[zmq.MAXMSGSIZE] <= 256 * limits.MIB
