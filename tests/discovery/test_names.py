"""Peers by DNS, asked of a real server on loopback."""

import pytest

from kvd import limits
from kvd.discovery import names
from kvd.discovery.names import MAX_SECONDS, MIN_SECONDS, PeerNames
from kvd.errors import BadRequest, Unavailable
from kvd.net import keys
from kvd.net.keys import Allowed
from kvd.net.trust import Trust
from tests.discovery.responder import Responder

SERVICE = "_kvd._tcp.decode.example"
OWN = "tcp://10.0.0.7:7710"
KEYS = [keys.generate() for _ in range(2)]
TRUST = Trust(KEYS[0], "decode-0", {KEYS[1].public: Allowed("decode-1")})


@pytest.fixture
def responder():
    with Responder() as started:
        yield started


def named(responder, name=SERVICE, *, own=OWN, trust=None):
    return PeerNames(name, "decode-0", own, trust, responder.address)


def pods(responder, *numbers, ttl=30):
    services = [f"0 33 77{number}0 decode-{number}.decode.example." for number in numbers]
    responder.records[SERVICE, "SRV"] = (ttl, *services)
    for number in numbers:
        responder.records[f"decode-{number}.decode.example", "A"] = (ttl, f"10.0.0.{7 + number}")


async def test_a_service_is_every_daemon_of_its_srv_records_but_ourselves(responder):
    pods(responder, 0, 1, 2)
    responder.records["decode-2.decode.example", "AAAA"] = (9, "fd00::9")
    found = await named(responder).look_up()
    assert found.addresses == {"tcp://10.0.0.8:7710", "tcp://10.0.0.9:7720", "tcp://[fd00::9]:7720"}
    assert found.holds == 9


async def test_a_headless_service_is_every_address_of_its_host_but_our_own(responder):
    responder.records["decode.example", "A"] = (30, "10.0.0.7", "10.0.0.8")
    found = await named(responder, "decode.example:7710").look_up()
    assert found.addresses == {"tcp://10.0.0.8:7710"}


async def test_with_curve_an_address_has_the_key_of_the_name_and_strangers_are_left_out(responder):
    pods(responder, 0, 1, 2)
    found = await named(responder, trust=TRUST).look_up()
    assert found.addresses == {f"tcp://10.0.0.8:7710#{KEYS[1].public.hex()}"}
    assert found.strangers == {"decode-2"}


@pytest.mark.parametrize("ttl", [0, 3600])
async def test_however_long_records_hold_they_are_asked_for_neither_often_nor_hardly_ever(responder, ttl):
    pods(responder, 1, ttl=ttl)
    assert (await named(responder).look_up()).holds == (MIN_SECONDS if ttl == 0 else MAX_SECONDS)


async def test_a_name_without_records_is_nobody(responder):
    assert (await named(responder).look_up()).addresses == set()
    responder.records["decode.example", "TXT"] = (30, "nothing")
    assert (await named(responder, "decode.example:1").look_up()).addresses == set()


async def test_a_server_that_is_silent_is_an_error_and_not_nobody(responder, monkeypatch):
    monkeypatch.setattr(names, "_LOOKUP_SECONDS", 0.1)
    responder.silent = True
    with pytest.raises(Unavailable, match=f"looking up {SERVICE}"):
        await named(responder).look_up()


async def test_daemons_of_other_hosts_are_refused_where_they_could_not_find_us(responder):
    pods(responder, 1)
    with pytest.raises(BadRequest, match="set `listen`"):
        await named(responder, own="tcp://127.0.0.1:7710").look_up()


async def test_more_daemons_than_can_be_met_are_refused(responder, monkeypatch):
    monkeypatch.setattr(limits, "MAX_PEERS", 1)
    pods(responder, 1, 2)
    with pytest.raises(BadRequest, match="has 2 daemons; 1 may be met"):
        await named(responder).look_up()


@pytest.mark.parametrize(
    ("name", "trust", "reason"),
    [
        ("decode.example", None, "neither `_service._tcp.name`"),
        ("_kvd._udp.decode", None, "neither"),
        ("decode.example:7710", TRUST, "no daemon names to find keys by; use SRV records"),
    ],
)
def test_names_that_cannot_work_are_refused_at_start(name, trust, reason):
    with pytest.raises(BadRequest, match=reason):
        PeerNames(name, "decode-0", OWN, trust, "127.0.0.1:1")
