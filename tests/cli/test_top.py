import json

import msgspec
import pytest

from kvd.cli.main import main
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


def test_a_daemon_that_was_started_again_between_two_updates_is_watched_on(monkeypatch, capsys):
    statuses = [Totals(9.0, 500, 0, {}, 0, 0, {}), Totals(1.0, 100, 0, {}, 0, 0, {}), Totals(2.0, 300, 0, {}, 0, 0, {})]

    class Connection:
        """To a daemon that ends once it has said its status."""

        def __init__(self, _path):
            self.statuses = statuses[:1]
            del statuses[:1]

        def status(self, _timeout):
            return msgspec.json.encode(status_report(self.statuses.pop()))

        def __enter__(self):
            return self

        def __exit__(self, *_): ...

    monkeypatch.setattr("kvd.cli.top.Inquiry", Connection)
    assert main(["top", "--json", "--count", "3", "--interval", "0"]) == 0
    assert [json.loads(line)["bytes_per_second"] for line in capsys.readouterr().out.splitlines()] == [0, 0, 200]
