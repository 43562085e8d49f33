import itertools

from kvd.bench import stalls


def test_a_gap_is_what_the_clock_ran_on_without_the_program():
    ticks = itertools.chain([0.0, 0.0001, 0.0061, 0.0062, 0.0172], itertools.count(1.0))
    assert [round(gap, 4) for gap in stalls.gaps_of(0.5, lambda: next(ticks))] == [0.006, 0.011, 0.9828]


def test_every_core_is_kept_busy_and_heard(monkeypatch):
    monkeypatch.setattr(stalls, "_SECONDS", 0.2)
    found = stalls.measure()
    assert 0 <= found.longest < 60
    assert 0 <= found.share <= 300
