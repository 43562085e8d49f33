"""Specs of peers are read beside the loop, one at a time."""

import msgspec
import pytest

from kvd.net.interface import PeerAnswered
from kvd.protocol import codec
from kvd.protocol.peer import Claim, Ping, Pong, PoolInfo
from kvd.protocol.worker import Attached
from tests.actors.stage import CACHE, Stage, make_ticket, welcome_of


class Slow(Stage):
    """What is to be done beside the loop is done when `work` is called."""

    def __init__(self, **settings):
        super().__init__(heartbeat=1.0, **settings)
        self.attach()
        self.waiting = []
        self.actors.handshake._introductions._reader._background = lambda work, done: self.waiting.append((work, done))

    def work(self):
        work, done = self.waiting.pop(0)
        done(work())
        self.run()

    def welcomed(self, link, *dtypes):
        """The peer of a link describes a pool for each dtype."""
        self.hears(link, *dtypes)
        self.run()

    def hears(self, link, *dtypes, incarnation=5):
        """The same, of which the actors take note later."""
        pools = tuple(
            PoolInfo(f"p{number}", 1, bytes(8), CACHE.spec.pool_bytes, spec_of(dtype))
            for number, dtype in enumerate(dtypes)
        )
        welcome = welcome_of(incarnation=incarnation)
        said = msgspec.structs.replace(welcome, agent=f"peer#{link}-{incarnation}", pools=pools)
        self.dependencies.peer_port.on_event(PeerAnswered(link, codec.encode(said)))

    def met(self):
        return [link for link, peer in self.actors.handshake._peers.by_link.items() if peer.announced]


def spec_of(dtype):
    return msgspec.structs.replace(CACHE.spec, dtype=dtype).encode()


@pytest.fixture
def stage():
    stage = Slow()
    for number, name in enumerate("abc", 1):
        pool = "p0" if name == "c" else f"none-of-{name}"
        ticket = make_ticket(pool, address=f"tcp://{name}:1")
        stage.pull(name, (number,), ticket=ticket, timeout=600.0)
    return stage


def test_one_spec_is_read_at_a_time_and_peers_take_turns(stage):
    stage.welcomed(1, *(f"a{number}" for number in range(40)))
    stage.welcomed(2, *(f"b{number}" for number in range(40)))
    stage.welcomed(3, CACHE.spec.dtype)
    for _ in range(3):
        assert len(stage.waiting) == 1
        assert stage.asks(Claim) == []
        stage.work()
    assert len(stage.asks(Claim)) == 1
    assert isinstance(stage.on_sessions[-1], Attached)
    reads = 3
    while stage.waiting:
        assert len(stage.waiting) == 1
        stage.work()
        reads += 1
    assert reads == 81


def crowd():
    """A stage with five links of one key, whose pools nobody has, and one of another; and these."""
    stage = Slow()
    for number in range(1, 6):
        ticket = make_ticket("none", address=f"tcp://hostile:{number}#{'ab' * 32}")
        stage.pull(f"h{number}", (), ticket=ticket, timeout=600.0)
    stage.pull("honest", (1,), ticket=make_ticket("p0", address=f"tcp://honest:1#{'cd' * 32}"), timeout=600.0)
    links = stage.dependencies.peer_port.links
    hostile = [link for link in links if "hostile" in links[link]]
    [honest] = links.keys() - set(hostile)
    return stage, hostile, honest


def test_links_of_one_key_take_one_partys_turns():
    stage, hostile, honest = crowd()
    for link in hostile:
        stage.welcomed(link, *(f"x{link}-{number}" for number in range(5)))
    stage.welcomed(honest, CACHE.spec.dtype)
    for _ in range(3):
        stage.work()
    assert len(stage.asks(Claim)) == 1


def test_what_comes_as_a_spec_is_read_goes_behind_those_that_wait():
    stage, hostile, honest = crowd()
    stage.welcomed(hostile.pop(), "x")
    stage.welcomed(honest, CACHE.spec.dtype)
    for _ in range(2):
        work, done = stage.waiting.pop(0)
        done(work())
        stage.hears(link := hostile.pop(), f"x{link}")
        stage.run()
    assert len(stage.asks(Claim)) == 1


def test_a_link_whose_spec_others_have_had_read_has_no_more_turns_for_that():
    stage = Slow()
    for number, name in enumerate(["hostile", *"abcdef"]):
        pool = "none" if name == "hostile" else "p0"
        ticket = make_ticket(pool, address=f"tcp://{name}:1#{bytes([number]).hex() * 32}")
        stage.pull(name, (), ticket=ticket, timeout=600.0)
    links = stage.dependencies.peer_port.links
    hostile, *honest = links
    stage.welcomed(hostile, *(f"x{number}" for number in range(40)), CACHE.spec.dtype)
    for link in honest:
        stage.welcomed(link, CACHE.spec.dtype)
    stage.work()
    assert set(honest) <= set(stage.met())


def test_a_peer_that_restarts_as_its_spec_is_read_has_one_read_at_a_time(stage):
    stage.welcomed(1)
    peer = stage.actors.handshake._peers.by_link[1]
    stage.actors.handshake._ping(peer)
    ping = stage.asks(Ping)[-1]
    stage.welcomed(1, "x", "y")
    work, done = stage.waiting.pop(0)
    done(work())
    stage.dependencies.peer_port.on_event(PeerAnswered(1, codec.encode(Pong(ping.number, 6, 0))))
    stage.hears(1, "u", "v", "w", incarnation=6)
    stage.run()
    reads = 0
    while stage.waiting:
        assert len(stage.waiting) == 1
        stage.work()
        reads += 1
    assert reads == 4  # with "x", which was begun before anybody knew


def test_a_welcome_that_comes_while_a_spec_of_the_one_before_is_read_is_read_behind_it(stage):
    stage.welcomed(1, "x")
    stage.actors.handshake._introductions.forget(1)
    stage.actors.handshake._peers.by_link[1].is_heeded = True
    stage.welcomed(1, "y", "z")
    reads = 0
    while stage.waiting:
        assert len(stage.waiting) == 1
        stage.work()
        reads += 1
    assert reads == 3
    assert 1 in stage.met()


def test_a_defect_in_one_introduction_costs_that_one_alone(stage, monkeypatch):
    introductions = stage.actors.handshake._introductions
    introduced, broken = introductions._introduced, [2]

    def once_failing(link, welcome, pools):
        if link in broken:
            broken.remove(link)
            raise RuntimeError
        introduced(link, welcome, pools)

    introductions._introduced = once_failing
    stage.welcomed(1, "x")
    stage.welcomed(2, "x")
    stage.welcomed(3, "y")
    with pytest.raises(AssertionError):  # the stage tells of the defect
        stage.work()
    stage.failures.clear()
    introductions.forget(2)
    stage.actors.handshake._peers.by_link[2].is_heeded = True
    stage.welcomed(2, "z")
    while stage.waiting:
        stage.work()
    assert {2, 3} <= set(stage.met())


def test_a_spec_that_is_known_is_not_read_again(stage):
    stage.welcomed(1, "x", "y")
    for _ in range(2):
        stage.work()
    stage.welcomed(2, "y", "x", "x")
    assert stage.waiting == []
    assert stage.met() == [1, 2]


def test_a_peer_that_goes_while_its_spec_is_read_is_greeted_anew(stage):
    stage.welcomed(1, "x")
    stage.run(4.5)
    [failed] = [item for item in stage.notified if item.request == "a"]
    assert "no answer for 3 heartbeats" in failed.text
    stage.work()
    assert stage.met() == []
    assert stage.waiting == []


def test_a_second_welcome_does_not_take_the_place_of_the_one_that_is_read(stage):
    stage.welcomed(1, "x")
    stage.welcomed(1, "y")
    stage.work()
    assert stage.waiting == []
    assert stage.met() == [1]
