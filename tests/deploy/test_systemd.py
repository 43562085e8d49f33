"""The unit under a real systemd: start, notification, watchdog, and restarts that cost no bytes and no worker."""

import itertools
import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.deploy.machine import Machine, tree, why_not
from tests.support.fleet import RemoteError, Worker, until
from tests.support.patience import PATIENCE

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(600)]
BLOCKS = list(range(32))
COUNT = itertools.count()


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    reason = why_not()
    if reason:
        pytest.skip(f"no machine with a systemd of its own: {reason}")
    root = tree(Path(__file__).parents[2] / "out/tree")
    with Machine(root, tmp_path_factory.mktemp("machine")) as booted:
        booted.run("systemctl", "start", "kvd@0", "kvd@1")
        yield booted


@pytest.fixture
def pair(machine: Machine) -> Iterator[tuple[Worker, Worker]]:
    """A worker at each daemon; the producer's pool is filled with 7."""
    with ExitStack() as stack:
        number = next(COUNT)  # a pool of its own for each test
        attached = [
            worker(machine, instance, f"{name}-{number}") for instance, name in enumerate(("prefill", "decode"))
        ]
        for one in attached:
            stack.callback(one.child.stop)
        prefill, decode = attached
        prefill.call("fill", ids=BLOCKS, value=7)
        yield prefill, decode


def worker(machine: Machine, instance: int, name: str) -> Worker:
    daemon = SimpleNamespace(socket=f"/run/kvd/{instance}/kvd.sock")
    return Worker(machine, daemon, name, f"{name}-worker", blocks=64, block_bytes=65536)


def pull(prefill: Worker, decode: Worker, number: int) -> str:
    """Offers, pulls and waits: the kind of the outcome, or the code of what was refused."""
    name = f"{number}"
    try:
        ticket = prefill.call("offer", name=f"o{name}", ids=BLOCKS)
        decode.call("pull", name=f"r{name}", ticket=ticket, ids=BLOCKS, timeout=PATIENCE / 2)
        return str(decode.outcome(f"r{name}")["kind"])
    except RemoteError as error:
        for attached in (prefill, decode):
            attached.call("wait", timeout=0.2)  # a client attaches again while it is polled
        return error.code


def restarted(machine: Machine, unit: str, before: str) -> None:
    for _ in until(f"{unit} is restarted"):
        if machine.show(unit, "MainPID") not in (before, "0") and machine.show(unit, "ActiveState") == "active":
            return


def test_the_confined_daemons_start_notify_and_copy(machine: Machine, pair: tuple[Worker, Worker]) -> None:
    assert machine.show("kvd@0", "StatusText") == "serving peers at ipc:///run/kvd/0/kvd.sock.peers"
    assert machine.run("stat", "--format=%U", "/proc/" + machine.show("kvd@0", "MainPID")).strip() == "kvd"
    assert pull(*pair, number=0) == "Done"
    assert set(pair[1].call("values", ids=BLOCKS)) == {7}
    report = machine.run("/opt/kvd/bin/kvd", "status", "--socket", "/run/kvd/1/kvd.sock", "--json")
    (peer,) = json.loads(report)["handshake"]
    assert peer["path"] == "copy/memory"
    assert peer["slow"] is None


def test_a_stopped_daemon_is_restarted_by_the_watchdog_and_its_worker_goes_on(
    machine: Machine, pair: tuple[Worker, Worker]
) -> None:
    prefill, decode = pair
    assert pull(prefill, decode, 1) == "Done"
    before, began = machine.show("kvd@1", "MainPID"), machine.run("date", "+@%s").strip()
    machine.run("systemctl", "kill", "--signal=STOP", "--kill-who=main", "kvd@1")
    restarted(machine, "kvd@1", before)
    assert int(machine.show("kvd@1", "NRestarts")) >= 1
    assert "atchdog" in machine.run("journalctl", "--no-pager", "--unit=kvd@1", f"--since={began}")
    for _ in until("the worker pulls again"):
        if pull(prefill, decode, 1000 + next(COUNT)) == "Done":
            break
    assert not decode.child.wait(0)


def test_a_restart_under_load_keeps_the_pools_bytes_and_the_workers(
    machine: Machine, pair: tuple[Worker, Worker]
) -> None:
    prefill, decode = pair
    marked = [40, 41, 42]
    decode.call("fill", ids=marked, value=9)
    before = machine.show("kvd@1", "MainPID")
    restart = threading.Thread(target=machine.run, args=("systemctl", "restart", "kvd@1"))
    outcomes: list[str] = []
    for _ in range(5):
        outcomes.append(pull(prefill, decode, 2000 + next(COUNT)))
    restart.start()
    after_restart = 0
    for _ in until("pulls are done again after the restart"):
        outcomes.append(pull(prefill, decode, 2000 + next(COUNT)))
        after_restart += outcomes[-1] == "Done" and not restart.is_alive()
        if after_restart >= 5:
            break
    restart.join()
    assert machine.show("kvd@1", "MainPID") != before
    assert set(outcomes) <= {"Done", "Failed", "shutting_down", "daemon_lost"}, outcomes
    assert decode.call("values", ids=marked) == [9, 9, 9]
    assert not decode.child.wait(0)
    assert not prefill.child.wait(0)


def test_the_store_keeps_a_pool_whose_worker_is_gone_too(machine: Machine) -> None:
    first = worker(machine, 0, "lonely")
    first.call("fill", ids=BLOCKS, value=5)
    first.child.stop()
    assert stored(machine, "kvd@0") >= 1
    machine.run("systemctl", "restart", "kvd@0")
    second = worker(machine, 0, "lonely")
    assert second.attached["kept"] is True
    assert set(second.call("values", ids=BLOCKS)) == {5}
    held = stored(machine, "kvd@0")
    second.call("detach")
    second.child.stop()
    for _ in until("the store gives an ended pool back"):
        if stored(machine, "kvd@0") < held:
            break


def test_what_nobody_claims_leaves_the_store_in_time_and_what_a_worker_has_stays(machine: Machine) -> None:
    """The worker brings its pool back to the daemon that was restarted; the next restart takes the worker, too."""
    machine.run("sh", "-c", "mkdir -p /etc/kvd && echo KVD_POOL_LINGER=15 > /etc/kvd/2.env")
    machine.run("systemctl", "start", "kvd@2")
    engine, gone = worker(machine, 2, "engine"), worker(machine, 2, "gone")
    engine.call("fill", ids=BLOCKS, value=7)
    gone.child.stop()
    machine.run("systemctl", "restart", "kvd@2")
    for _ in until("the worker has its pool again"):
        if any(event["kind"] == "Reattached" for event in engine.call("wait", timeout=1.0)):
            break
    assert stored(machine, "kvd@2") == 4, "two pools, each with the process that it was lent to"
    for _ in until("the other's pool is given back, and what is known of its process"):
        if stored(machine, "kvd@2") == 2:
            break
    engine.child.stop()
    machine.run("sh", "-c", "echo KVD_POOL_LINGER=600 > /etc/kvd/2.env")  # the successor may need longer to start
    machine.run("systemctl", "restart", "kvd@2")
    successor = worker(machine, 2, "engine")
    assert successor.attached["kept"] is True
    assert set(successor.call("values", ids=BLOCKS)) == {7}
    successor.child.stop()
    machine.run("systemctl", "stop", "kvd@2")


def stored(machine: Machine, unit: str) -> int:
    """Descriptors that systemd keeps for a unit."""
    return int(machine.show(unit, "NFileDescriptorStore"))
