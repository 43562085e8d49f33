"""The simulator notices when any mechanism behind a promise is removed."""

import os

import pytest

from tests.simulator.checks.promises import Promise
from tests.simulator.mutations import MUTATIONS
from tests.simulator.run import run_seed
from tests.simulator.traffic.pieces import WAITING

MOST = 400
"""Seeds to try from `first`, which is stored anew where a change of the code has moved it farther."""
QUICK = "KVD_ALL_MUTATION_SEEDS" not in os.environ
"""Begins where each was found before. `KVD_ALL_MUTATION_SEEDS=1 python -m pytest --timeout=0` begins at 0, and says
which seeds find each: `-o junit_logging=all --junit-xml=FILE`."""


@pytest.mark.sample(5)
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_the_simulator_finds_that(mutation, monkeypatch, record_property):
    if mutation.needs in WAITING:
        pytest.skip(f"worlds have no {mutation.needs} yet")
    mutation.apply(monkeypatch)
    seeds = range(mutation.first * QUICK, mutation.first + MOST)
    for seed in seeds:
        broken = run_seed(seed, keep_trace=False).violations
        if any(text.startswith(f"[{mutation.breaks}]") for text in broken):
            record_property("found_at_seed", seed)
            return
    pytest.fail(f"no violation of {mutation.breaks} in the worlds of {seeds}")


def test_every_promise_has_a_mutation():
    assert {mutation.breaks for mutation in MUTATIONS} == set(Promise)
