"""The measurement of TCP between hosts."""

import pytest

from kvd.bench import wire


@pytest.mark.skipif(wire.why_not() is not None, reason=str(wire.why_not()))
def test_tcp_between_two_hosts_is_measured_beside_iperf3():
    steps = []
    found = wire.measure(2, lambda: steps.append(1))
    assert len(steps) == 4
    assert min(found.iperf[1], found.raw_default, found.raw_tuned, found.kvd) > 0
    assert found.as_dict()["ratio"] == found.kvd / found.iperf[1]
