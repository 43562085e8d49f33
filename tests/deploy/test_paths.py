"""Which path the bytes take: named by the lanes, judged by what the hardware would allow, and reported."""

import json
from pathlib import Path

import pytest

from kvd.cli.main import main
from kvd.net.inquiry import Inquiry
from kvd.protocol.status import StatusReport, decode
from kvd.transport.nixl.ucx_endpoints import UcxEndpoints
from kvd.transport.path import Kind, is_copied, kind_of, why_slow
from tests.support.fleet import Fleet

BLOCKS = [1, 2, 3]


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("", Kind.UNKNOWN),
        ("something/new", Kind.UNKNOWN),
        ("tcp/eth0 tcp/lo", Kind.TCP),
        ("cma/memory tcp/lo", Kind.CMA),
        ("sysv/memory tcp/lo", Kind.SHM),
        ("rc_mlx5/mlx5_0:1 cma/memory", Kind.RDMA),
        ("rc_mlx5/mlx5_0:1 cuda_ipc/cuda", Kind.CUDA_IPC),
    ],
)
def test_a_path_is_as_good_as_its_best_lane(path: str, kind: Kind) -> None:
    assert kind_of(path) is kind


@pytest.mark.parametrize(
    ("path", "copied"),
    [
        ("cma/memory posix/memory self/memory", True),
        ("cma/memory tcp/lo cuda_ipc/cuda", True),
        ("rc_mlx5/mlx5_0:1 cma/memory", False),
        ("cma/memory something/new", False),
        ("xpmem/memory", False),
        ("posix/memory tcp/lo", False),
        ("", False),
    ],
)
def test_only_cma_beside_lanes_that_read_no_host_memory_is_a_copy_by_the_kernel(path: str, copied: bool) -> None:
    assert is_copied(path) is copied


def test_tcp_is_slow_where_a_same_host_copy_or_rdma_could_be() -> None:
    tcp = "tcp/eth0"
    assert "one PID namespace" in str(why_slow(tcp, same_host=True, rdma_here=False))
    assert "RDMA devices" in str(why_slow(tcp, same_host=False, rdma_here=True))
    assert why_slow(tcp, same_host=False, rdma_here=False) is None
    assert why_slow("cma/memory tcp/lo", same_host=True, rdma_here=True) is None
    assert why_slow("", same_host=True, rdma_here=True) is None


def test_where_no_ucx_is_loaded_nothing_is_known_and_nothing_fails() -> None:
    lanes = UcxEndpoints("nobody")
    assert lanes.endpoints() == frozenset()
    assert lanes.of(0) == []
    assert lanes.components() == []


def pulled(fleet: Fleet) -> StatusReport:
    """What the consumer says after one pull between two daemons of this host."""
    source, target = fleet.daemon("p"), fleet.daemon("d")
    prefill, decode_worker = fleet.worker(source, "prefill"), fleet.worker(target, "decode")
    decode_worker.call("pull", name="r", ticket=prefill.call("offer", name="o", ids=BLOCKS), ids=BLOCKS)
    assert decode_worker.outcome("r")["kind"] == "Done"
    with Inquiry(str(target.socket)) as inquiry:
        return decode(inquiry.status(10))


@pytest.mark.e2e
def test_a_fall_back_to_tcp_on_one_host_is_warned_of_shown_and_counted(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    status = pulled(fleet)
    (peer,) = status.handshake
    assert kind_of(peer.path) is Kind.TCP
    assert "on this host" in str(peer.slow)
    warned = [json.loads(line) for line in (tmp_path / "d-1.log").read_text().splitlines()]
    assert [entry["path"] for entry in warned if entry["event"] == "slow path"] == [peer.path]
    assert main(["doctor", "--no-transfer", "--json", "--socket", str(tmp_path / "d.sock")]) == 0
    findings = json.loads(capsys.readouterr().out)
    assert [finding["level"] for finding in findings if finding["subject"] == "peer p"] == ["slow"]


@pytest.mark.e2e
def test_a_same_host_copy_is_named_and_not_called_slow(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self,cma")
    (peer,) = pulled(fleet).handshake
    assert kind_of(peer.path) is Kind.CMA
    assert peer.slow is None
