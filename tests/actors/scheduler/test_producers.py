from types import SimpleNamespace

import pytest

from kvd import limits
from kvd.actors.scheduler import producers
from kvd.actors.scheduler.producers import Producers


@pytest.fixture
def made(monkeypatch):
    """The ranks of each route that was worked out."""
    made = []
    monkeypatch.setattr(producers, "route_key", lambda _pool, ranks, _views: (1, ranks))
    monkeypatch.setattr(producers, "make_route", lambda _pool, ranks, _views: made.append(ranks) or ranks)
    return made


def pull(*ranks):
    return SimpleNamespace(pool=None, ticket=SimpleNamespace(ranks=ranks), views={})


def test_routes_have_a_bound_by_their_ranks_and_those_used_last_stay(made, monkeypatch):
    monkeypatch.setattr(limits, "MAX_ROUTED_RANKS", 4)
    known = Producers()
    for ranks in (("a",), ("b",), ("c", "d"), ("a",)):
        assert known.sources(pull(*ranks)) == ranks
    assert made == [("a",), ("b",), ("c", "d")]
    known.sources(pull("e"))
    assert known.routes == 3
    known.sources(pull("a"))
    assert len(made) == 4
    known.sources(pull("b"))
    assert made[-1] == ("b",)
    for number in range(100):
        known.sources(pull(number, "x", "y"))
    assert known.routes == 1
    known.sources(pull(*range(9)))
    assert known.routes == 1
