"""Daemons and workers that share a GPU's memory, over the stand-in driver, whose memory the CPU sees here."""

import pytest

from tests.support.fleet import RemoteError, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]


@pytest.fixture
def machine(standin, monkeypatch):
    """Every process that is started from now on has the stand-in's GPUs."""
    standin.set(cpu_visible=1)
    for name, value in standin.environment.items():
        monkeypatch.setenv(name, value)
    return standin


def test_a_workers_pool_on_a_gpu_survives_the_daemon(machine, fleet):
    daemon = fleet.daemon("gpu", device="cuda:0")
    worker = fleet.worker(daemon, "w")
    assert worker.attached["backing"] == "cuda"
    worker.call("fill", ids=[3, 60], value=7)
    before = worker.attached["incarnation"]
    daemon.restart()
    for _ in until("the worker is attached to the new daemon"):
        if any(event["kind"] == "Reattached" for event in worker.call("wait", timeout=1.0)):
            break
    [pool] = worker.call("status")["pools"]
    assert (pool["backing"], pool["device"], pool["state"]) == ("cuda", worker.attached["device"], "lent")
    assert worker.call("status")["incarnation"] != before
    worker.call("fill", ids=[4], value=9)
    worker.kill()
    successor = fleet.worker(daemon, "w")
    assert successor.attached["kept"]
    assert successor.call("values", ids=[3, 4, 60, 61]) == [7, 9, 7, 0]


def test_a_worker_finds_its_gpu_by_identity_whatever_its_number(machine, fleet, monkeypatch):
    machine.set(device_count=3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    daemon = fleet.daemon("gpu", device="cuda:0")
    daemon.serving()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2")
    worker = fleet.worker(daemon, "w")
    worker.call("fill", ids=[1], value=5)
    worker.kill()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(RemoteError, match=r"no_device: the pool is on GPU-.*, which this process does not see"):
        fleet.worker(daemon, "w")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,1,0")
    assert fleet.worker(daemon, "w").call("values", ids=[1, 2]) == [5, 0]


def test_a_pool_that_the_worker_gives_back_is_memory_of_the_gpu_again(machine, fleet):
    machine.set(total_memory=64 << 20)
    daemon = fleet.daemon("gpu", device="cuda:0")
    for name in ("first", "second"):  # each takes more than half
        fleet.worker(daemon, name, blocks=40, block_bytes=1 << 20).call("detach")
