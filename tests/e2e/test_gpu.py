"""Daemons and workers with pools in GPU memory, over the stand-in driver, whose memory the CPU sees here."""

import json
import re

import pytest

from kvd.limits import GPU_SLICE_DESCRIPTORS
from tests.support.fleet import RemoteError, until
from tests.support.patience import PATIENCE

pytestmark = pytest.mark.real


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


@pytest.mark.parametrize("way", ["detached", "killed"])
def test_memory_of_a_pool_that_others_have_read_is_the_gpus_again_when_it_ends(machine, fleet, way):
    """An engine that comes back with another size finds room: daemons that have the old pool mapped unmap it."""
    machine.set(total_memory=64 << 20, device_count=2)
    producer, consumer = fleet.daemon("p", device="cuda:0"), fleet.daemon("d", device="cuda:1")
    prefill = fleet.worker(producer, "prefill", blocks=40, block_bytes=1 << 20)
    decode = fleet.worker(consumer, "decode", blocks=40, block_bytes=1 << 20)
    decode.call("pull", name="r", ticket=prefill.call("offer", name="r", ids=[1]), ids=[2])
    assert decode.outcome("r")["kind"] == "Done"
    if way == "detached":
        prefill.call("detach")
    prefill.kill()
    again = fleet.worker(producer, "prefill", blocks=36, block_bytes=1 << 20)
    again.call("fill", ids=[1], value=9)
    ticket = again.call("offer", name="s", ids=[1])
    for turn, _ in enumerate(until("the new pool is read")):  # the consumer hears of it when it asks again
        decode.call("pull", name=f"s{turn}", ticket=ticket, ids=[3])
        if decode.outcome(f"s{turn}")["kind"] == "Done":
            break
    assert decode.call("values", ids=[3]) == [9]


BLOCKS, BLOCK_BYTES = 64, 1 << 16
SOURCE, TARGET = list(range(0, BLOCKS, 2)), list(range(1, BLOCKS, 2))


@pytest.mark.parametrize(
    ("source", "target"), [("cuda:0", "cuda:0"), ("cpu", "cuda:0"), ("cuda:0", "cpu"), ("cuda:1", "cuda:0")]
)
def test_blocks_move_between_pools_whatever_memory_they_are_in(machine, fleet, source, target):
    machine.set(device_count=2)
    producer, consumer = fleet.daemon("p", device=source), fleet.daemon("d", device=target)
    size = {"blocks": BLOCKS, "block_bytes": BLOCK_BYTES}
    prefill, decode = fleet.worker(producer, "prefill", **size), fleet.worker(consumer, "decode", **size)
    prefill.call("fill", ids=SOURCE, value=7)
    for turn in range(2):
        decode.call("clear")
        ticket = prefill.call("offer", name=f"r{turn}", ids=SOURCE)
        decode.call("pull", name=f"r{turn}", ticket=ticket, ids=TARGET)
        assert decode.outcome(f"r{turn}")["kind"] == "Done"
        assert decode.call("values", ids=TARGET) == [7] * len(TARGET)
        assert decode.call("untouched", ids=TARGET, value=0)
    [peer] = decode.call("status")["handshake"]
    assert peer["path"] == "copy/memory"


def test_a_copy_that_the_gpu_has_not_made_is_not_done(machine, fleet):
    producer, consumer = fleet.daemon("p", device="cuda:0"), fleet.daemon("d", device="cuda:0")
    prefill, decode = fleet.worker(producer, "prefill"), fleet.worker(consumer, "decode")
    prefill.call("fill", ids=[1, 2], value=7)
    machine.set(hold=1)
    decode.call("pull", name="r", ticket=prefill.call("offer", name="r", ids=[1, 2]), ids=[3, 4])
    for _ in until("the read has begun"):
        if "reading" in decode.call("status")["scheduler"]["transfers"]:
            break
    assert decode.call("values", ids=[3, 4]) == [0, 0]
    machine.set(hold=0)
    assert decode.outcome("r")["kind"] == "Done"
    assert decode.call("values", ids=[3, 4]) == [7, 7]


def test_a_gpu_that_is_lost_during_a_read_ends_the_daemon_which_names_the_error(machine, fleet):
    producer, consumer = fleet.daemon("p", device="cuda:0"), fleet.daemon("d", device="cuda:0")
    prefill, decode = fleet.worker(producer, "prefill"), fleet.worker(consumer, "decode")
    ticket = prefill.call("offer", name="r", ids=[1, 2])
    machine.set(hold=1)
    decode.call("pull", name="r", ticket=ticket, ids=[3, 4])
    for _ in until("the read has begun"):
        if "reading" in decode.call("status")["scheduler"]["transfers"]:
            break
    machine.set(device_error=214)
    ended = decode.outcome("r")
    assert ended["kind"] == "Failed"
    assert "CUDA_ERROR_ECC_UNCORRECTABLE" in ended["text"]
    assert consumer.child.wait(PATIENCE)
    entries = [json.loads(line) for line in consumer.log.read_text().splitlines() if line.startswith("{")]
    assert entries[-1]["event"] == "stopped"
    assert "CUDA_ERROR_ECC_UNCORRECTABLE" in entries[-1]["failure"]


def test_a_pool_that_the_gpu_has_no_room_for_is_refused_with_both_figures(machine, fleet):
    machine.set(total_memory=64 << 20, used_memory=10 << 20)
    daemon = fleet.daemon("gpu", device="cuda:0")
    daemon.serving()
    needed, free, total = 82 << 20, 54 << 20, 64 << 20  # bytes; the pool's mark takes a granule more
    refused = fleet.refusal(daemon, "w", blocks=80, block_bytes=1 << 20)
    assert re.match(rf"overloaded: .*needs {needed} bytes of GPU 0 .*{free} of {total} are free", str(refused))
    fleet.worker(daemon, "w", blocks=40, block_bytes=1 << 20)


def test_a_small_pull_overtakes_a_long_one_that_the_gpu_copies_slowly(machine, fleet):
    producer, consumer = fleet.daemon("p", device="cuda:0"), fleet.daemon("d", device="cuda:0", copy_threads="1")
    size = {"blocks": 4 * GPU_SLICE_DESCRIPTORS, "block_bytes": 512}
    prefill, decode = fleet.worker(producer, "prefill", **size), fleet.worker(consumer, "decode", **size)
    long, small = list(range(0, 3 * GPU_SLICE_DESCRIPTORS, 2)), [4 * GPU_SLICE_DESCRIPTORS - 1]  # two slices, and one
    tickets = [prefill.call("offer", name=name, ids=ids) for name, ids in (("long", long), ("small", small))]
    machine.set(copy_us=300)
    decode.call("pull", name="long", ticket=tickets[0], ids=long)
    decode.call("pull", name="small", ticket=tickets[1], ids=small)
    assert decode.outcome("small")["kind"] == "Done"
    assert decode.call("status")["scheduler"]["busy_blocks"] == {"decode": len(long)}
    machine.set(copy_us=0)
    assert decode.outcome("long")["kind"] == "Done"
