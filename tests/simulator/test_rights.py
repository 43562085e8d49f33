"""Rights are withdrawn in the middle of all other faults."""

import random

import pytest

from kvd.actors.runtime.actor import call
from tests.simulator.run import run_seed
from tests.simulator.traffic.schedule import ACTIVE, Schedule

SEEDS, BATCH = 60, 10


@pytest.fixture
def withdrawals(monkeypatch):
    """Registers pools anew at times drawn separately, which leaves the rest of a seed's world as it is."""
    plan, done = Schedule.plan, []

    def also(schedule):
        plan(schedule)
        dice, world = random.Random(len(done)), schedule.world  # noqa: S311 - dice, not secrets

        def withdraw():
            daemon = dice.choice(schedule.daemons)
            if daemon.alive and daemon.actors.pools._records:
                world.disturb(daemon.name)
                pool = dice.choice(sorted(daemon.actors.pools._records))
                call(daemon.actors.pools.renew, pool)
                done.append(pool)

        for _ in range(8):
            world.loop.call_later(dice.random() * ACTIVE, withdraw)

    monkeypatch.setattr(Schedule, "plan", also)
    return done


@pytest.mark.sample(6)
@pytest.mark.parametrize("first", range(0, SEEDS, BATCH))
def test_no_promise_is_broken_where_pools_are_registered_anew(withdrawals, first):
    for seed in range(first, first + BATCH):
        result = run_seed(seed)
        assert not result.violations, f"seed {seed}: {result.violations}"
    assert len(withdrawals) > 2 * BATCH
