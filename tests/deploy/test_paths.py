"""Which path the bytes take: named by the lanes, judged by what the hardware would allow, and reported."""

import pytest

from kvd.net.inquiry import Inquiry
from kvd.protocol.status import StatusReport, decode
from kvd.transport.nixl.ucx import UcxEndpoints
from kvd.transport.path import Kind, how_read, kind_of, why_slow
from tests.support.fleet import Fleet
from tests.support.patience import PATIENCE

BLOCKS = [1, 2, 3]


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("", Kind.UNKNOWN),
        ("something/new", Kind.UNKNOWN),
        ("copy/memory", Kind.COPY),
        ("tcp/eth0 tcp/lo", Kind.TCP),
        ("cma/memory tcp/lo", Kind.CMA),
        ("sysv/memory tcp/lo", Kind.SHM),
        ("rc_mlx5/mlx5_0:1 cma/memory", Kind.RDMA),
    ],
)
def test_a_path_is_as_good_as_its_best_lane(path: str, kind: Kind) -> None:
    assert kind_of(path) is kind


def test_tcp_is_slow_where_rdma_could_be() -> None:
    assert "RDMA devices" in str(why_slow("tcp/eth0", rdma_here=True))
    assert why_slow("tcp/eth0", rdma_here=False) is None
    assert why_slow("rc_mlx5/mlx5_0:1 tcp/lo", rdma_here=True) is None
    assert why_slow("", rdma_here=True) is None


def test_each_way_that_bytes_come_is_named_with_its_reason() -> None:
    assert how_read("") == ""
    assert "by a way that UCX does not tell" in how_read("something/new")
    assert how_read("copy/memory") == "copied within this host"
    straight = "straight out of the peer's host memory into that of this host"
    assert how_read("tcp/eth0") == f"over TCP, {straight}"
    assert how_read("rc_mlx5/mlx5_0:1 tcp/eth0") == f"by RDMA, {straight}"
    assert "over TCP, by way of pinned host memory of the peer, as" in how_read("tcp/eth0 staged/there")
    assert "over TCP, by way of pinned host memory of this host, as" in how_read("tcp/eth0 staged/here")
    assert "by RDMA, by way of pinned host memory of the peer and of this host, as kvd registers no GPU's memory" in (
        how_read("rc_mlx5/mlx5_0:1 staged/there staged/here")
    )
    assert kind_of("tcp/eth0 staged/there") is Kind.TCP


def test_where_no_ucx_is_loaded_nothing_is_known_and_nothing_fails() -> None:
    lanes = UcxEndpoints("nobody")
    assert lanes.endpoints() == frozenset()
    assert lanes.of(0) == []
    assert lanes.components() == []


def pulled(fleet: Fleet, **settings: str) -> StatusReport:
    """What the consumer says after one pull between two daemons of this host."""
    source, target = fleet.daemon("p", **settings), fleet.daemon("d", **settings)
    prefill, decode_worker = fleet.worker(source, "prefill"), fleet.worker(target, "decode")
    decode_worker.call("pull", name="r", ticket=prefill.call("offer", name="o", ids=BLOCKS), ids=BLOCKS)
    assert decode_worker.outcome("r")["kind"] == "Done"
    with Inquiry(str(target.socket)) as inquiry:
        return decode(inquiry.status(PATIENCE))


@pytest.mark.real
def test_a_copy_within_the_host_is_named_and_not_called_slow(fleet: Fleet) -> None:
    (peer,) = pulled(fleet).handshake
    assert kind_of(peer.path) is Kind.COPY
    assert peer.slow is None
