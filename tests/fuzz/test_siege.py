"""A few thousand messages at a real daemon. `python -m tests.fuzz` sends a million, and holds latencies to a bound."""

import pytest

from tests.fuzz.attack import REGISTRY
from tests.fuzz.known import KNOWN
from tests.fuzz.siege import Plan, besiege

MESSAGES, SECONDS = 4000, 15.0


def besieged(folder, attacks, *, keyed):
    folder.chmod(0o755)
    plan = Plan(MESSAGES, 1, SECONDS, attacks, keyed=keyed, before_seconds=0.5)
    report = besiege(plan, folder)
    print(report.text())
    return report.broken(latency=False, whole=False)


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize("keyed", [True, False], ids=["with keys", "without keys"])
def test_a_daemon_under_attack_lives_and_serves_and_is_as_large_as_before(folder, keyed):
    assert not besieged(folder, sorted(REGISTRY.keys() - KNOWN.keys()), keyed=keyed)


def test_every_known_defect_is_of_an_attack_that_there_is():
    assert KNOWN.keys() <= REGISTRY.keys()
