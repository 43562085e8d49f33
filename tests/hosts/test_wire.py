"""The measurement of TCP between hosts."""

import pytest

from benchmarks.hosts import wire


@pytest.mark.skipif(wire.why_not() is not None, reason=str(wire.why_not()))
def test_tcp_between_two_hosts_is_measured_beside_iperf3():
    steps = []
    found = wire.measure(1, 2, lambda: steps.append(1))
    assert len(steps) == 1
    assert min(found.turns[0].values()) > 0
    assert found.ratio("iperf3, 1 stream") == 1.0
