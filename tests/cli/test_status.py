"""`kvd status` and what it shows, without a daemon."""

import contextlib
import io
import json
from types import SimpleNamespace

import msgspec
import pytest
from rich.console import Console

from kvd.cli import status, top
from kvd.cli.main import main
from kvd.cli.status import status_view
from kvd.protocol.status import LeaseStatus, PullStatus, Totals
from tests.support.statuses import status_report

MARKUP = {"[/a": 1, "b]": 2}
"""Names that are markup only together."""
IDLE = status_report(Totals(1.0, 0, 0, {}, 0, 0, {}))


def text_of(view):
    out = io.StringIO()
    Console(file=out, highlight=False, width=400).print(view)
    return out.getvalue()


def asked_of(report, monkeypatch, *command):
    """The exit status of a command to which a daemon answers with `report`."""
    inquiry = contextlib.nullcontext(SimpleNamespace(status=lambda _: report))
    for module in (status, top):
        monkeypatch.setattr(module, "Inquiry", lambda _: inquiry)
    return main([*command, "--socket", "/nowhere"])


@pytest.mark.parametrize(
    "said",
    [
        {"totals": Totals(1.0, 0, 0, MARKUP, 0, 0, {})},
        {"scheduler": PullStatus(0, MARKUP, 0, {})},
        {"scheduler": PullStatus(0, {}, 0, {}, blocks=MARKUP)},
        {"leases": LeaseStatus(0, 0, 0, 0, blocks=MARKUP)},
    ],
)
def test_names_that_are_markup_together_are_shown(said):
    assert "1 [/a, 2 b]" in text_of(status_view(msgspec.structs.replace(IDLE, **said)))


def test_outcomes_that_are_markup_together_are_shown_by_top():
    rates = top.Rates()
    for seconds in (1.0, 2.0):
        rates.add(Totals(seconds, 0, 0, MARKUP, 0, 0, {}))
    assert "[/a 0/s   b] 0/s" in text_of(top.view(IDLE, rates))


def test_json_has_what_was_checked_and_nothing_else(monkeypatch, capsys):
    report = msgspec.json.encode(IDLE)[:-1] + b',"unknown":[1e999,' + 5000 * b"1" + b"]}"
    assert asked_of(report, monkeypatch, "status", "--json") == 0
    assert json.loads(capsys.readouterr().out) == msgspec.to_builtins(IDLE)


@pytest.mark.parametrize("command", ["status", "status --json", "top --count=2", "top --count=2 --json"])
def test_a_report_that_is_refused_ends_a_command_with_2_and_the_reason(command, monkeypatch, capsys):
    report = msgspec.json.encode(IDLE)[:-1] + b',"unknown":' + 100_000 * b"[" + 100_000 * b"]" + b"}"
    assert asked_of(report, monkeypatch, *command.split()) == 2
    assert "this is no status of this release: maximum recursion depth" in capsys.readouterr().err
