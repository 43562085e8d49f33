"""The main job over real daemons, workers, sockets and NIXL."""

import json
import signal
import urllib.request

import pytest

from tests.support.fleet import Fleet, RemoteError, send, until
from tests.support.patience import PATIENCE

pytestmark = pytest.mark.real


def start_pair(fleet):
    producer, consumer = fleet.daemon("p"), fleet.daemon("d")
    return producer, consumer, fleet.worker(producer, "prefill"), fleet.worker(consumer, "decode")


@pytest.fixture
def pair(fleet):
    """For a test that ends one of them."""
    return start_pair(fleet)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """For tests that end nobody and leave no offer; the daemons have no other workers than these two."""
    with Fleet(tmp_path_factory.mktemp("shared")) as fleet:
        yield fleet, start_pair(fleet)


@pytest.fixture
def idle_pair(shared):
    """The shared one, its pools all zero."""
    _, (producer, consumer, *workers) = shared
    for worker in workers:
        worker.call("clear")
    return producer, consumer, *workers


def test_blocks_arrive_where_they_were_asked_for_and_nowhere_else(idle_pair):
    _, _, prefill, decode = idle_pair
    prefill.call("fill", ids=[1, 2], value=7)
    prefill.call("fill", ids=[9], value=8)
    ticket = prefill.call("offer", name="r", ids=[1, 2, 9])
    decode.call("pull", name="r", ticket=ticket, ids=[30, 4, 50])
    assert decode.outcome("r")["kind"] == "Done"
    assert decode.call("values", ids=[30, 4, 50]) == [7, 7, 8]
    assert decode.call("untouched", ids=[30, 4, 50], value=0)
    assert prefill.outcome("r") == {"kind": "Released", "offer": "r", "reason": "read"}


def test_blocks_move_between_two_pools_of_one_daemon(fleet):
    daemon = fleet.daemon("one")
    prefill, decode = fleet.worker(daemon, "prefill"), fleet.worker(daemon, "decode")
    prefill.call("fill", ids=[1, 2], value=7)
    decode.call("pull", name="r", ticket=prefill.call("offer", name="r", ids=[1, 2]), ids=[3, 1])
    assert decode.outcome("r")["kind"] == "Done"
    assert decode.call("values", ids=[3, 1]) == [7, 7]
    assert prefill.outcome("r")["reason"] == "read"


@pytest.mark.slow
def test_a_pull_may_come_before_its_offer(idle_pair):
    _, _, prefill, decode = idle_pair
    ticket = prefill.call("offer", name="early", ids=[1])
    prefill.call("cancel", name="early")
    assert prefill.outcome("early")["reason"] == "withdrawn"
    decode.call("pull", name="late", ticket=ticket, ids=[1])
    ended = decode.outcome("late")
    assert (ended["kind"], ended["code"]) == ("Failed", "offer_gone")
    assert "withdrawn" in ended["text"]


def test_a_withdrawn_offer_that_is_overwritten_in_mid_read_never_ends_as_done(shared):
    fleet, (producer, consumer, *_) = shared
    size = {"blocks": 256, "block_bytes": 1 << 20}
    prefill, decode = fleet.worker(producer, "large-prefill", **size), fleet.worker(consumer, "large-decode", **size)
    every = list(range(256))
    for turn in range(5):
        prefill.call("fill", ids=every, value=1)
        ticket = prefill.call("offer", name=f"r{turn}", ids=every)
        decode.call("pull", name=f"r{turn}", ticket=ticket, ids=every)
        prefill.call("cancel", name=f"r{turn}")
        assert prefill.outcome(f"r{turn}")["kind"] == "Released"
        prefill.call("fill", ids=every, value=2)
        if decode.outcome(f"r{turn}")["kind"] == "Done":  # the fence came before the withdrawal
            assert decode.call("values", ids=every) == [1] * 256
    for worker in (prefill, decode):
        worker.call("detach")


def test_a_pull_does_not_write_to_what_its_worker_offers(pair):
    _, _, prefill, decode = pair
    for block in range(5):
        prefill.call("fill", ids=[block], value=block)
    ticket = prefill.call("offer", name="r", ids=[0, 1, 2, 3])
    prefill.call("pull", name="own", ticket=ticket, ids=[1, 2, 3, 4])
    ended = prefill.outcome("own")
    assert (ended["kind"], ended["code"]) == ("Failed", "blocks_busy")
    assert "block 1 of group 0 stands in an offer" in ended["text"]
    decode.call("pull", name="r", ticket=ticket, ids=[10, 11, 12, 13])
    assert decode.outcome("r")["kind"] == "Done"
    assert decode.call("values", ids=[10, 11, 12, 13]) == [0, 1, 2, 3]
    assert prefill.outcome("r")["kind"] == "Released"
    prefill.call("fill", ids=[0], value=9)
    again = prefill.call("offer", name="again", ids=[0])
    prefill.call("pull", name="own", ticket=again, ids=[4])
    assert prefill.outcome("own")["kind"] == "Done"
    assert prefill.call("values", ids=[4]) == [9]


def test_bad_requests_are_refused_with_what_was_wrong_and_change_nothing(idle_pair):
    _, _, prefill, decode = idle_pair
    ticket = prefill.call("offer", name="r", ids=[1])
    with pytest.raises(RemoteError, match=r"bad_blocks: block id 64 .*64"):
        prefill.call("offer", name="other", ids=[64])
    with pytest.raises(RemoteError, match=r"duplicate_request"):
        prefill.call("offer", name="r", ids=[1])
    for request, text, ids, code in (
        ("garbage", "no ticket", [1], "bad_ticket"),
        ("version", "kvd9." + ticket[5:], [1], "bad_ticket"),
        ("cut", ticket[:-9], [1], "bad_ticket"),
        ("ids", ticket, [64], "bad_blocks"),
        ("twice", ticket, [3, 3], "bad_blocks"),
        ("more", ticket, [3, 4], "bad_blocks"),
    ):
        decode.call("pull", name=request, ticket=text, ids=ids)
        ended = decode.outcome(request)
        assert (ended["kind"], ended["code"], ended["quarantined"]) == ("Failed", code, False), ended
    decode.call("pull", name="right", ticket=ticket, ids=[3])
    assert decode.outcome("right")["kind"] == "Done"
    assert decode.call("untouched", ids=[], value=0)
    assert prefill.outcome("r")["reason"] == "read"


def test_a_worker_that_comes_back_finds_its_pool_and_its_bytes(fleet, pair):
    producer, _, prefill, decode = pair
    prefill.call("fill", ids=[5], value=9)
    prefill.kill()
    for _ in until("the pool is free for a successor"):
        try:
            again = fleet.worker(producer, "prefill")
        except RemoteError as error:
            assert error.code == "pool_busy"  # noqa: PT017 - the daemon may not have seen the death yet
            continue
        break
    assert again.attached["kept"]
    ticket = again.call("offer", name="r", ids=[5])
    decode.call("pull", name="r", ticket=ticket, ids=[6])
    assert decode.outcome("r")["kind"] == "Done"
    assert decode.call("values", ids=[6]) == [9]


def test_a_pool_is_not_lent_beside_a_process_that_gave_up_its_session_but_lives_on(fleet):
    daemon = fleet.daemon("p", attach_wait="0.2")
    before = fleet.worker(daemon, "prefill")
    before.call("fill", ids=[5], value=9)
    before.call("close")
    refused = fleet.refusal(daemon, "prefill")
    assert f"process {before.child.pid} had it and has not ended" in str(refused)
    assert refused.code == "pool_busy"
    before.kill()
    after = fleet.worker(daemon, "prefill")
    assert after.attached["kept"]
    assert after.call("values", ids=[5]) == [9]


@pytest.mark.parametrize("side", ["producer", "consumer"])
def test_a_daemon_that_was_killed_gets_its_pools_back_from_the_workers(pair, side):
    producer, consumer, prefill, decode = pair
    prefill.call("fill", ids=[5], value=9)
    (producer if side == "producer" else consumer).restart()
    worker = prefill if side == "producer" else decode
    for _ in until("the worker is attached again"):
        if any(event["kind"] == "Reattached" for event in worker.call("wait", timeout=1)):
            break
    ticket = prefill.call("offer", name="r", ids=[5])
    decode.call("pull", name="r", ticket=ticket, ids=[6])
    assert decode.outcome("r")["kind"] == "Done"
    assert decode.call("values", ids=[6]) == [9]


def test_sigterm_ends_a_daemon_cleanly_and_its_worker_is_told(pair):
    producer, _, prefill, _ = pair
    prefill.call("offer", name="r", ids=[1])
    send(producer.child, signal.SIGTERM)
    assert prefill.outcome("r")["reason"] == "shutdown"
    assert producer.child.wait(PATIENCE)
    entries = [json.loads(line) for line in producer.log.read_text().splitlines()]
    assert entries[-1]["event"] == "stopped"
    assert "status 0" in str(producer.child.ended())


def test_the_http_port_answers_for_prometheus_and_probes(idle_pair):
    producer, _, prefill, _ = idle_pair
    http = producer.serving()["http"]

    def get(path):
        with urllib.request.urlopen(f"http://{http}{path}", timeout=PATIENCE) as answer:
            return answer.status, answer.read().decode()

    assert get("/livez") == (200, "alive\n")
    assert get("/readyz") == (200, "ready\n")
    prefill.call("offer", name="r", ids=[1])
    status, text = get("/metrics")
    assert status == 200
    assert "kvd_leases_active 1.0" in text
    assert "kvd_workers 1.0" in text
    prefill.call("cancel", name="r")
    assert prefill.outcome("r")["reason"] == "withdrawn"
