import pytest

from kvd.actors.leases.ended import Tombstones
from kvd.actors.runtime.actor import Actor, Dispatcher
from tests.simulator.virtual.loop import VirtualLoop


class Owner(Actor):
    name = "owner"


class Cemetery:
    def __init__(self, most: int = 100) -> None:
        self.loop = VirtualLoop()
        self.forgotten: list[tuple[float, str]] = []
        owner = Owner(Dispatcher(self.loop, None))
        self.stones: Tombstones[str] = Tombstones(owner, 10.0, most, self._forget)

    def _forget(self, key: str) -> None:
        self.forgotten.append((self.loop.time(), key))


@pytest.fixture
def cemetery() -> Cemetery:
    return Cemetery()


def test_each_key_is_remembered_for_its_time(cemetery: Cemetery) -> None:
    start = cemetery.loop.time()
    cemetery.stones.bury("a", "x")
    cemetery.loop.call_later(4.0, cemetery.stones.bury, "b", "y")
    cemetery.loop.call_later(30.0, cemetery.stones.bury, "c", "x")
    cemetery.loop.run_until(start + 60.0)
    assert [(when - start, key) for when, key in cemetery.forgotten] == [(10.0, "a"), (14.0, "b"), (40.0, "c")]
    assert not len(cemetery.stones)


def test_the_oldest_go_early_where_there_are_too_many() -> None:
    cemetery = Cemetery(most=2)
    for key in "abcd":
        cemetery.stones.bury(key, key)
    assert [key for _, key in cemetery.forgotten] == ["a", "b"]
    assert len(cemetery.stones) == 2


def test_who_buries_more_than_half_has_its_own_oldest_forgotten_and_nobody_elses() -> None:
    cemetery = Cemetery(most=4)
    cemetery.stones.bury("honest", "one")
    for number in range(10):
        cemetery.stones.bury(f"{number}", "other")
    assert [key for _, key in cemetery.forgotten] == [f"{number}" for number in range(8)]
    assert len(cemetery.stones) == 3


def test_what_is_buried_again_is_remembered_from_then_on_by_one_timer(cemetery: Cemetery) -> None:
    start = cemetery.loop.time()
    sweeps = []
    cemetery.stones.sweep = lambda sweep=cemetery.stones.sweep: sweeps.append(1) or sweep()  # type: ignore[method-assign]
    for second in range(5):
        cemetery.loop.call_later(float(second), cemetery.stones.bury, "a", "x")
    cemetery.loop.run_until(start + 60.0)
    assert [(when - start, key) for when, key in cemetery.forgotten] == [(14.0, "a")]
    assert len(sweeps) == 2
