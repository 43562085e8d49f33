"""CURVE over real daemons: who is on the list moves blocks, who is not moves none."""

import os
import signal
import socket
import urllib.request
from functools import partial

import pytest
from msgspec.structs import replace

from kvd.protocol import ticket as tickets
from kvd.protocol.types import Span
from tests.discovery.responder import Responder
from tests.support.fleet import Fleet, send, until
from tests.support.keyring import Keyring
from tests.support.patience import PATIENCE

pytestmark = pytest.mark.real


def rejected(daemon, reason):
    with urllib.request.urlopen(f"http://{daemon.serving()['http']}/metrics", timeout=PATIENCE) as answer:
        for line in answer.read().decode().splitlines():
            if line.startswith(f'kvd_peers_rejected_total{{reason="{reason}"}}'):
                return float(line.split()[1])
    return 0.0


def test_blocks_move_between_daemons_on_the_list_until_sighup_takes_one_off(fleet: Fleet, tmp_path):
    ring = Keyring(fleet, tmp_path)
    start_p, start_d = ring.daemon("p"), ring.daemon("d")
    producer, consumer = start_p(), start_d(drain_grace="0.1")
    prefill, decode = fleet.worker(producer, "prefill"), fleet.worker(consumer, "decode")
    prefill.call("fill", ids=[1], value=7)
    ticket = prefill.call("offer", name="r", ids=[1])
    decode.call("pull", name="r", ticket=ticket, ids=[3])
    assert decode.outcome("r")["kind"] == "Done"
    assert decode.call("values", ids=[3]) == [7]

    ring.write("p")
    _read_list_again(producer)
    late = prefill.call("offer", name="late", ids=[1])
    decode.call("pull", name="late", ticket=late, ids=[4], timeout=5.0)
    ended = decode.outcome("late")
    assert ended["kind"] == "Failed", ended
    assert decode.call("values", ids=[4]) == [0]
    for _ in until("the consumer is rejected"):
        if rejected(producer, "unknown_key"):
            break
    assert producer.log.read_text().count('"peer rejected"') == 1


@pytest.mark.slow
def test_a_daemon_reads_the_pools_that_its_line_names_and_no_others(fleet: Fleet, tmp_path):
    ring = Keyring(fleet, tmp_path)
    start_p, start_d = ring.daemon("p"), ring.daemon("d")
    ring.write("p", "d prefill*")
    producer, consumer = start_p(), start_d()
    prefill, other = fleet.worker(producer, "prefill"), fleet.worker(producer, "other")
    decode = fleet.worker(consumer, "decode")
    for worker, name, value, kind in ((prefill, "may", 7, "Done"), (other, "may-not", 8, "Failed")):
        worker.call("fill", ids=[1], value=value)
        decode.call("pull", name=name, ticket=worker.call("offer", name=name, ids=[1]), ids=[3])
        ended = decode.outcome(name)
        assert ended["kind"] == kind, ended
        assert decode.call("values", ids=[3]) == [7]
    assert "other" in ended["text"]

    ring.write("p", "d nothing")
    _read_list_again(producer)
    late = prefill.call("offer", name="late", ids=[1])
    decode.call("pull", name="late", ticket=late, ids=[4], timeout=5.0)
    assert decode.outcome("late")["kind"] == "Failed"
    assert decode.call("values", ids=[4]) == [0]


@pytest.mark.slow
def test_a_daemon_without_a_key_moves_nothing(fleet: Fleet, tmp_path):
    ring = Keyring(fleet, tmp_path)
    producer, consumer = ring.daemon("p")(), fleet.daemon("d")
    prefill, decode = fleet.worker(producer, "prefill"), fleet.worker(consumer, "decode")
    ticket = prefill.call("offer", name="r", ids=[1])
    decode.call("pull", name="r", ticket=ticket, ids=[3])
    ended = decode.outcome("r")
    assert ended["kind"] == "Failed"
    assert "uses CURVE and this one does not; give it `curve_key` and `curve_peers`" in ended["text"]


def has_met(daemon):
    with urllib.request.urlopen(f"http://{daemon.serving()['http']}/metrics", timeout=PATIENCE) as answer:
        return 'kvd_peers{state="ready"} 1.0' in answer.read().decode()


def test_a_daemon_in_the_peer_file_is_met_before_anybody_pulls(fleet: Fleet, tmp_path):
    ring, peers = Keyring(fleet, tmp_path), tmp_path / "fleet"
    start_p, start_d = ring.daemon("p"), ring.daemon("d")
    peers.write_text("")
    producer, consumer = start_p(), start_d(peers=str(peers), heartbeat="1")
    place = producer.serving()["address"].partition("#")[0]
    peers.write_text(f"p {place}\n")
    for _ in until("the daemons have met"):
        if has_met(consumer):
            break


@pytest.mark.slow
def test_a_daemon_that_dns_names_is_met_before_anybody_pulls(fleet: Fleet, tmp_path):
    ring = Keyring(fleet, tmp_path)
    start_p, start_d = ring.daemon("p"), ring.daemon("d")
    producer = start_p(listen="tcp://127.0.0.1:0")
    port = producer.serving()["address"].partition("#")[0].rpartition(":")[2]
    with Responder() as responder:
        responder.records["_kvd._tcp.p.example", "SRV"] = (5, f"0 0 {port} p.example.")
        responder.records["p.example", "A"] = (5, "127.0.0.1")
        consumer = start_d(peers_dns="_kvd._tcp.p.example", dns_server=responder.address, heartbeat="1")
        for _ in until("the daemons have met"):
            if has_met(consumer):
                break


@pytest.mark.parametrize(
    "wrong",
    [
        {"generation": 1, "stamp": 0},
        {"generation": 1},
        {"secret": b"made up by thief"},
        {"secret": b"made up by thief", "stamp": 0},
        {},
    ],
    ids=["a lease that never was", "its stamp, too", "another secret", "another secret and no stamp", "other blocks"],
)
def test_a_ticket_that_somebody_made_up_brings_no_byte_though_it_names_a_lease(fleet: Fleet, wrong):
    producer, consumer = fleet.daemon("p"), fleet.daemon("d")
    victim = fleet.worker(producer, "victim")
    victim.call("fill", ids=[1, 2], value=7)
    right = tickets.decode(victim.call("offer", name="r", ids=[2]))
    never_offered = (Span(0, 0, (1).to_bytes(4, "little")),)
    made_up = replace(right, ranks=(replace(right.ranks[0], **wrong),), blocks=(never_offered,)).encode()
    for daemon in (producer, consumer):
        thief = fleet.worker(daemon, "thief")
        thief.call("pull", name="q", ticket=made_up, ids=[3])
        ended = thief.outcome("q")
        assert (ended["kind"], ended["code"]) == ("Failed", "bad_ticket")
        assert thief.call("values", ids=[3]) == [0]
        assert daemon.log.read_text().count('"ticket refused"') == 1
    thief.call("pull", name="r", ticket=right.encode(), ids=[3])
    assert thief.outcome("r")["kind"] == "Done"
    assert thief.call("values", ids=[3]) == [7]


def _read_list_again(producer) -> None:
    """Has a daemon read its allow-list again, which takes a right from somebody: returns when a pool has new keys."""
    send(producer.child, signal.SIGHUP)
    for _ in until("the pool has new keys"):
        if '"pool registered anew"' in producer.log.read_text():
            break


@pytest.mark.parametrize("made", ["before the pull", "after it"])
@pytest.mark.parametrize("keyed", [False, True], ids=["no keys", "keys"])
def test_a_ticket_that_leads_to_a_socket_whose_name_is_no_text_fails_one_pull(fleet: Fleet, tmp_path, keyed, made):
    ring = Keyring(fleet, tmp_path)
    start_p, start_d = (ring.daemon(name) if keyed else partial(fleet.daemon, name) for name in ("p", "d"))
    producer, consumer = start_p(), start_d(heartbeat="0.2")
    prefill, decode = fleet.worker(producer, "prefill"), fleet.worker(consumer, "decode")
    ticket = prefill.call("offer", name="bad", ids=[1])
    known = tickets.decode(ticket)
    alias = tmp_path / "alias.peers"
    places = [rank.address.replace(rank.address.partition("#")[0], f"ipc://{alias}") for rank in known.ranks]
    bad = replace(known, ranks=tuple(replace(rank, address=at) for rank, at in zip(known.ranks, places, strict=True)))
    named = os.fsencode(tmp_path) + b"/\xff.peers"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(named)
        listening.listen()
        if made == "before the pull":
            os.rename(named, alias)
        decode.call("pull", name="bad", ticket=bad.encode(), ids=[2], timeout=PATIENCE)
        if made == "after it":
            os.rename(named, alias)
        ended = decode.outcome("bad")
    assert (ended["kind"], ended["code"]) == ("Failed", "peer_lost"), ended
    assert "leads to the socket of the daemon at" in ended["text"]
    decode.call("pull", name="good", ticket=prefill.call("offer", name="good", ids=[1]), ids=[3])
    assert decode.outcome("good")["kind"] == "Done"
