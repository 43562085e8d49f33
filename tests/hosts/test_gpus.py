"""Pools in GPU memory, over the stand-in driver, read from other hosts over TCP by way of host memory."""

import os
import signal

import pytest

from benchmarks.hosts.namespaces import Hosts
from kvd.doctor import Level
from kvd.doctor.daemon import check_daemon
from tests.hosts.stage import BLOCKS, HEARTBEAT, LONG, MEGABITS, OPEN_END, PORT, SHORT, Stage
from tests.support.fleet import Fleet, send, until
from tests.support.gpu import MEMORIES, machine_with
from tests.support.keyring import Keyring
from tests.support.patience import PATIENCE
from tests.support.transports import transport_of


@pytest.fixture(params=[name for name in MEMORIES if "gpu" in name])
def pair(request, tmp_path):
    """A producer and two consumers, each on a host of its own."""
    source, target = devices = MEMORIES[request.param]
    with machine_with(devices, tmp_path), Hosts("p0", "d0", "d1") as hosts, Fleet(tmp_path) as fleet:
        daemons = {
            host.name: fleet.daemon(
                host.name,
                within=host.within,
                listen=f"tcp://{host.address}:{PORT}",
                insecure="true",
                unprotected_transport=host.address,
                heartbeat=str(HEARTBEAT),
                device=source if host.name == "p0" else target,
            )
            for host in hosts
        }
        yield Stage(fleet, {host.name: host for host in hosts}, daemons)


def scattered(stage, consumer):
    """Every other block arrives in the ones beside them, and nothing else is written to."""
    source, target = list(range(0, BLOCKS, 2)), list(range(1, BLOCKS, 2))
    producer, reader = stage.workers["p0"], stage.workers[consumer]
    reader.call("clear")
    producer.call("fill", ids=source, value=7)
    ticket = producer.call("offer", name=f"scattered-{consumer}", ids=source)
    reader.call("pull", name=f"scattered-{consumer}", ticket=ticket, ids=target)
    ended = reader.outcome(f"scattered-{consumer}")
    assert ended["kind"] == "Done", ended
    assert reader.call("values", ids=target) == [7] * len(target)
    assert reader.call("untouched", ids=target, value=0)


def test_blocks_move_between_hosts_whatever_memory_they_are_in(pair):
    stage = pair
    for consumer in ("d0", "d1"):
        scattered(stage, consumer)
    assert stage.peer("d0", "p0")["path"] == stage.path("d0", "p0", "tcp/eth0")
    found = [finding for finding in check_daemon(str(stage.daemons["d0"].socket), PATIENCE) if "p0" in finding.subject]
    [finding] = found
    assert finding.level is Level.NOTE
    assert "by way of pinned host memory" in finding.text


def test_what_is_offered_no_longer_is_never_done_with_other_bytes(pair):
    """Offers that are withdrawn in the middle of a read, and one that is not; their blocks are overwritten at once."""
    stage = pair
    producer, consumer = stage.workers["p0"], stage.workers["d0"]
    stage.hosts["p0"].throttle(10 * MEGABITS)
    kinds = []
    for turn, landed in enumerate((1, 8, 16, 32, 48, None)):
        name, value = f"ends-{turn}", 100 + turn
        producer.call("fill", ids=LONG, value=value)
        ticket = producer.call("offer", name=name, ids=LONG)
        consumer.call("pull", name=name, ticket=ticket, ids=LONG, timeout=OPEN_END)
        if landed is not None:
            for _ in until(f"{landed} blocks have landed"):
                if consumer.call("last_bytes", ids=LONG).count(value) >= landed:
                    break
            producer.call("cancel", name=name)
        assert producer.outcome(name)["kind"] == "Released"
        producer.call("fill", ids=LONG, value=200)
        ended = consumer.outcome(name)
        kinds.append(ended["kind"])
        if ended["kind"] == "Done":
            assert consumer.call("values", ids=LONG) == [value] * len(LONG)
        for _ in until("nothing is in quarantine"):
            if not consumer.call("status")["scheduler"]["quarantined"]:
                break
    assert set(kinds) == {"Done", "Failed"}


def _kill_transport(stage, name):
    os.kill(transport_of(stage.daemons[name]), signal.SIGKILL)


KILLS = {
    "transport": _kill_transport,
    "daemon": lambda stage, name: stage.daemons[name].kill(),
    "worker": lambda stage, name: stage.workers[name].kill(),
}


@pytest.mark.parametrize("victim", ["p0", "d0"])
@pytest.mark.parametrize("part", KILLS)
def test_a_kill_in_mid_transfer_costs_its_own_pulls_and_leaves_no_window_taken(pair, part, victim):
    stage = pair
    stage.hosts["p0"].throttle(MEGABITS)
    torn = stage.pull_in_mid_transfer("p0", "d0")
    spared, value = stage.pull("p0", "d1", OPEN_END, SHORT)
    KILLS[part](stage, victim)
    stage.hurry()
    if victim == "p0" or part == "transport":
        ended = stage.workers["d0"].outcome(torn)
        if part == "worker" and ended["kind"] == "Done":  # its blocks stay as they are until their readers have them
            assert stage.workers["d0"].call("values", ids=LONG) == [1 + int(torn[1:]) % 250] * len(LONG)
        else:
            assert ended["kind"] == "Failed", ended
            assert ended["code"] in ("transport", "peer_lost", "lease_broken"), ended
    if victim == "d0":
        assert stage.workers["d1"].outcome(spared)["kind"] == "Done"
        assert stage.workers["d1"].call("values", ids=SHORT) == [value] * len(SHORT)
    if part == "daemon":
        stage.daemons[victim].start()
        for _ in until(f"the worker of {victim} is attached again"):
            if any(event["kind"] == "Reattached" for event in stage.workers[victim].call("wait", timeout=1)):
                break
    stage.mend()
    for consumer in ("d0", "d1"):
        scattered(stage, consumer)


def test_readers_of_one_gpu_take_turns(pair):
    """A short pull of one host lands in the middle of a long one of another."""
    stage = pair
    stage.hosts["p0"].throttle(MEGABITS)
    long = stage.pull_in_mid_transfer("p0", "d0")
    producer, other = stage.workers["p0"], stage.workers["d1"]
    producer.call("fill", ids=[127], value=9)
    other.call("pull", name="short", ticket=producer.call("offer", name="short", ids=[127]), ids=[3], timeout=PATIENCE)
    assert other.outcome("short")["kind"] == "Done"
    assert other.call("values", ids=[3]) == [9]
    assert any(transfer == "reading" for transfer in stage.workers["d0"].call("status")["scheduler"]["transfers"])
    stage.hurry()
    assert stage.workers["d0"].outcome(long)["kind"] == "Done"


SMALL = {"blocks": 16, "block_bytes": 1 << 16}
FIRST, LAST = [0, 1, 2], [13, 14, 15]


@pytest.fixture
def rights(tmp_path):
    """Two pools on a GPU, `one` and `two`, and a consumer for each, on its own host, which may read that one alone."""
    devices = {"p0": "cuda:0", "d0": "cuda:0", "d1": "cpu"}
    with (
        machine_with(tuple(devices.values()), tmp_path),
        Hosts(*devices) as hosts,
        Fleet(tmp_path) as fleet,
    ):
        ring = Keyring(fleet, tmp_path)
        start = {name: ring.daemon(name) for name in devices}
        ring.write("p0", "d0 one", "d1 two")
        daemons = {
            host.name: start[host.name](
                within=host.within,
                listen=f"tcp://{host.address}:{PORT}",
                unprotected_transport=host.address,
                device=devices[host.name],
            )
            for host in hosts
        }
        pools = {name: fleet.worker(daemons["p0"], name, **SMALL) for name in ("one", "two")}
        readers = {name: fleet.worker(daemons[name], name, **SMALL) for name in ("d0", "d1")}
        yield ring, daemons["p0"], pools, readers


def test_two_hosts_read_one_pool_each_of_a_gpu_and_nothing_of_the_other_one(rights):
    ring, producer, pools, readers = rights
    turns = iter(range(100))

    def pull(pool, reader):
        name, value = f"{pool}-{next(turns)}", 10 + next(turns)
        pools[pool].call("fill", ids=FIRST, value=value)
        readers[reader].call("clear")
        ticket = pools[pool].call("offer", name=name, ids=FIRST)
        readers[reader].call("pull", name=name, ticket=ticket, ids=LAST)
        ended = readers[reader].outcome(name)
        assert readers[reader].call("values", ids=LAST) == [value if ended["kind"] == "Done" else 0] * len(LAST)
        return ended

    own = {"d0": "one", "d1": "two"}
    for reader, pool in own.items():
        assert pull(pool, reader)["kind"] == "Done"
    for reader, pool in (("d0", "two"), ("d1", "one")):
        ended = pull(pool, reader)
        assert ended["kind"] == "Failed", ended
        assert pool in ended["text"]
    ring.write("p0", "d0 nothing", "d1 two")
    send(producer.child, signal.SIGHUP)
    for _ in until("the pool has new keys"):
        if '"pool registered anew"' in producer.log.read_text():
            break
    assert pull("one", "d0")["kind"] == "Failed"
    assert pull("two", "d1")["kind"] == "Done"
