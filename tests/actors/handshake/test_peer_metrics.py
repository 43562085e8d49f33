"""What the metrics say of the peers that we connect to."""

import pytest

from kvd.actors.handshake.peer_table import State
from kvd.actors.runtime.actor import call
from kvd.transport.interface import PeerAdded, PeerFailed
from kvd.transport.path import kind_of
from tests.actors.stage import Stage, welcome_of


@pytest.mark.parametrize("path", ["rc/mlx5_0:1", "tcp/eth0"], ids=["fast", "slow"])
def test_the_metrics_count_the_path_to_a_peer_only_while_it_can_be_read_from(path):
    stage = Stage(heartbeat=1.0, peer_idle=10.0, rdma=True)
    stage.attach()
    stage.dependencies.transport.add_peer = lambda agent, metadata, _address: stage.dependencies.transport.on_event(
        PeerAdded(agent, metadata, path)
    )
    value, kind = stage.context.metrics.registry.get_sample_value, kind_of(path)
    counted = lambda: (value("kvd_peer_paths", {"kind": kind}), value("kvd_peers_slow"))  # noqa: E731
    stage.pull(timeout=1.0)
    stage.peer_says(welcome_of())
    reached = (1.0, float(kind == "tcp"))
    assert counted() == reached
    call(stage.actors.handshake.need, "tcp://peer:1", worker="w", stale=True)
    stage.run()
    stage.peer_says(welcome_of())
    assert counted() == reached
    stage.transport_says(PeerFailed("peer#1", "connection reset"))
    assert counted() == (0.0, 0.0)
    stage.run(60.0)
    assert counted() == (0.0, 0.0)
    assert not stage.actors.handshake._peers.by_address
    states = [stage.context.metrics.peers.labels(state)._value.get() for state in State]
    assert states == [0.0] * len(State)
