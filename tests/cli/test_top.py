import json

import pytest

from kvd.cli.top import Rates, sparkline
from kvd.protocol.status import Totals
from tests.support.statuses import status_report


def rates_between(*said):
    rates = Rates()
    for totals in said:
        rates.add(totals)
    return rates


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"1": 5, "2": 9}, {"1": 1, "2": 2}),
        ({"1": 5, "+Inf": 9}, {"1": 1, "+Inf": 9}),
        ({}, {"1": 0, "+Inf": 0}),
    ],
)
def test_without_more_pulls_than_before_there_is_no_duration(before, after):
    """As where a daemon was restarted and runs for longer than the one before it."""
    rates = rates_between(Totals(1.0, 0, 0, {}, 0, 0, before), Totals(2.0, 0, 0, {}, 0, 0, after))
    assert rates.p50 == rates.p99 == 0.0


def test_statuses_of_one_moment_have_no_rate():
    last = Totals(5e-324, (1 << 63) - 1, 0, {"done": (1 << 63) - 1}, 0, 0, {})
    rates = rates_between(Totals(0.0, 0, 0, {}, 0, 0, {}), last)
    assert json.loads(rates.as_json(status_report(last)))["bytes_per_second"] == 0
    assert sparkline(rates.history) == ""
