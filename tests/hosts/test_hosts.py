"""Two engines over two hosts each: every byte arrives; cut links and dead hosts cost only what they must."""

import os
import signal
import subprocess
import sys

import pytest

from tests.hosts.stage import MEGABITS, OPEN_END, PORT, SHORT
from tests.support.patience import PATIENCE
from tests.support.ports import endpoint, listening
from tests.support.transports import transport_of

CUTS = {
    "both ways": (lambda p, d: p.unplug(), lambda p, d: p.plug()),
    "from producer to consumer": (lambda p, d: p.mute(d), lambda p, d: p.unmute(d)),
    "from consumer to producer": (lambda p, d: d.mute(p), lambda p, d: d.unmute(p)),
}


def move_between_engines(stage, layout="flash-hnd", other="flash-hnd"):
    sockets = [str(stage.daemons[name].socket) for name in ("p0", "p1", "d0", "d1")]
    command = [sys.executable, "-m", "tests.hosts.moves", layout, other, *sockets]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=2 * PATIENCE, check=False)
    assert ran.returncode == 0, ran.stderr


@pytest.fixture
def slow(stage):
    """The producers' links, throttled so that a cut comes in mid-transfer."""
    for name in ("p0", "p1"):
        stage.hosts[name].throttle(MEGABITS)
    return stage


@pytest.mark.parametrize("layouts", [("flash-hnd", "flash-nhd"), ("cross-layer-nhd", "flash-hnd")], ids="-to-".join)
def test_every_byte_arrives_between_engines_of_two_hosts_each(stage, layouts):
    move_between_engines(stage, *layouts)
    assert {peer["path"] for peer in stage.workers["d0"].call("status")["handshake"]} == {
        stage.path("d0", "p0", "tcp/eth0")
    }


def test_a_daemon_of_several_hosts_listens_on_the_interface_of_its_peers_alone(stage):
    for name, daemon in stage.daemons.items():
        own, http = stage.hosts[name].address, endpoint(daemon.serving()["http"])
        assert listening(daemon.child.pid) == {http, (own, PORT)}, "the daemon itself has no port that asks for no key"
        of_transport = listening(transport_of(daemon))
        assert of_transport
        assert {host for host, _ in of_transport} == {own}


@pytest.mark.parametrize("cut", CUTS)
def test_a_link_that_is_cut_in_mid_transfer_costs_its_own_pulls_and_comes_back_by_itself(slow, cut):
    stage = slow
    sever, mend = CUTS[cut]
    ends = stage.hosts["p0"], stage.hosts["d0"]
    patient = stage.pull_in_mid_transfer("p0", "d0")
    hurried, _ = stage.pull("p0", "d0", timeout=3.0, ids=SHORT)
    spared = stage.pull("p1", "d1", OPEN_END)
    sever(*ends)
    stage.hurry()
    ended = stage.workers["d0"].outcome(hurried)
    assert (ended["kind"], ended["code"]) == ("Failed", "deadline")
    ended = stage.workers["d0"].outcome(patient)
    assert (ended["kind"], ended["code"]) == ("Failed", "peer_lost")
    assert stage.peer("d0", "p0")["state"] == "greeting"
    stage.arrived("d1", *spared)
    mend(*ends)
    stage.recover("p0", "d0")
    move_between_engines(stage)


@pytest.mark.parametrize("victim", ["p0", "d0"])
def test_a_host_that_loses_power_in_mid_transfer_is_missed_in_time_and_welcome_when_it_is_back(slow, victim):
    stage = slow
    torn = stage.pull_in_mid_transfer("p0", "d0")
    spared = stage.pull("p1", "d1", OPEN_END)
    stage.lose_power(victim)
    stage.hurry()
    if victim == "p0":
        ended = stage.workers["d0"].outcome(torn)
        assert (ended["kind"], ended["code"]) == ("Failed", "peer_lost")
    stage.arrived("d1", *spared)
    stage.boot(victim)
    stage.recover("p0", "d0")
    move_between_engines(stage)


def test_a_daemon_whose_address_changes_is_found_where_its_tickets_say(stage):
    for address in ("10.77.0.101", "10.77.0.1"):
        stage.move_house("p0", address)
        stage.notice("d0", "p0")
        stage.recover("p0", "d0")
        move_between_engines(stage)


@pytest.mark.parametrize("victim", ["p0", "d0"])
def test_a_transport_that_is_killed_in_mid_transfer_costs_its_own_pulls_and_no_daemon_nor_worker(slow, victim):
    stage = slow
    torn = stage.pull_in_mid_transfer("p0", "d0")
    spared = stage.pull("p1", "d1", OPEN_END)
    pids = {name: daemon.child.pid for name, daemon in stage.daemons.items()}
    before = transport_of(stage.daemons[victim])
    os.kill(before, signal.SIGKILL)
    stage.hurry()
    ended = stage.workers["d0"].outcome(torn)
    assert ended["kind"] == "Failed"
    assert ended["code"] in ("transport", "peer_lost"), ended
    stage.arrived("d1", *spared)
    stage.recover("p0", "d0")
    assert transport_of(stage.daemons[victim]) != before
    assert {name: daemon.child.pid for name, daemon in stage.daemons.items()} == pids
    assert not any(process.child.wait(0) for process in (*stage.daemons.values(), *stage.workers.values()))
