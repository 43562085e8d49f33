"""Two hosts whose data goes over a network of its own, which dies while messages get through."""

import os
import signal

import pytest

from benchmarks.hosts.namespaces import Hosts
from kvd.doctor import Level
from kvd.doctor.daemon import check_daemon
from tests.hosts.stage import HEARTBEAT, MEGABITS, PORT, SHORT, Stage
from tests.support.fleet import Fleet, until
from tests.support.patience import PATIENCE
from tests.support.transports import transport_of


@pytest.fixture
def split(devices, tmp_path):
    with Hosts("p0", "d0", data=True) as hosts, Fleet(tmp_path) as fleet:
        daemons = {
            host.name: fleet.daemon(
                host.name,
                within=host.within,
                listen=f"tcp://{host.address}:{PORT}",
                insecure="true",
                unprotected_transport=host.data_address,
                heartbeat=str(HEARTBEAT),
                device=device,
            )
            for host, device in zip(hosts, devices, strict=True)
        }
        yield Stage(fleet, {host.name: host for host in hosts}, daemons)


def goes_on(stage):
    """Blocks arrive again, and nobody complains."""
    for _ in until("blocks arrive again"):
        name, _ = stage.pull("p0", "d0", PATIENCE)
        if stage.workers["d0"].outcome(name)["kind"] == "Done":
            break
    assert faults(stage) == []
    assert stage.readyz("d0").strip() == "ready"


def faults(stage, daemon="d0"):
    """What the doctor finds broken there."""
    findings = check_daemon(str(stage.daemons[daemon].socket), PATIENCE)
    return [finding for finding in findings if finding.level is Level.BROKEN]


def test_a_network_of_the_data_that_dies_alone_costs_its_pulls_and_gives_every_block_back_and_is_named(split):
    stage = split
    assert faults(stage) == []
    producer = stage.hosts["p0"]
    producer.throttle(MEGABITS)
    torn = stage.pull_in_mid_transfer("p0", "d0")
    assert stage.peer("d0", "p0")["path"] == stage.path("d0", "p0", "tcp/eth1")
    producer.unplug_data()
    # What is sent for this one is never acknowledged: the kernel alone would try for a quarter of an hour.
    late, _ = stage.pull("p0", "d0", timeout=1.0, ids=SHORT)
    ended = stage.workers["d0"].outcome(late)
    assert (ended["kind"], ended["code"], ended["quarantined"]) == ("Failed", "deadline", True)
    ended = stage.workers["d0"].outcome(torn)
    # The first of its slices to fail shows that the peer is lost. The others may end a moment later: its blocks are in
    # quarantine for so long.
    assert ended["kind"] == "Failed"
    assert ended["code"] in ("transport", "peer_lost")
    for _ in until("nothing is in quarantine"):
        if not stage.workers["d0"].call("status")["scheduler"]["quarantined"]:
            break
    for _ in until("the producer holds no claim"):
        if not stage.workers["p0"].call("status")["leases"]["claims_held"]:
            break
    stage.pull("p0", "d0", timeout=PATIENCE)  # somebody wants the peer: it is greeted, and tried again
    for _ in until("the daemon says that the peer is not reached", pause=0.5):
        if "answers messages, and its memory is not reached" in stage.readyz("d0"):
            break
    assert stage.readyz("d0").startswith("ready\n")
    assert "10.77.0.1" in stage.readyz("d0")
    [fault] = faults(stage)
    assert "its memory has not been reached for" in fault.text
    assert "unprotected_transport" in fault.fix
    producer.plug_data()
    stage.hurry()
    goes_on(stage)


@pytest.mark.slow  # half a minute passes before a daemon says so
@pytest.mark.parametrize("devices", ["host-to-host"], indirect=True)
def test_a_transport_that_crashed_and_cannot_start_on_a_device_that_is_down_is_named_by_peers(split):
    """UCX itself may crash when its device goes down, and starts on one that is up only."""
    stage = split
    stage.arrived("d0", *stage.pull("p0", "d0", PATIENCE))
    stage.hosts["p0"].unplug_data()
    os.kill(transport_of(stage.daemons["p0"]), signal.SIGSEGV)
    for _ in until("the daemon says that the peer is not reached", pause=0.5):
        stage.workers["d0"].outcome(stage.pull("p0", "d0", PATIENCE)[0])
        if "its memory is not reached (it refused the handshake: the transport of p0 to" in stage.readyz("d0"):
            break
    assert any("UCX does not start" in fault.text for fault in faults(stage, "p0"))
    [fault] = faults(stage)
    assert "has not come back" in fault.text
    stage.hosts["p0"].plug_data()
    goes_on(stage)
