"""`python -m benchmarks.vllm` around a measurement that is faked."""

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.vllm import __main__ as bench_vllm
from benchmarks.vllm import run as vllm
from benchmarks.vllm import servers
from benchmarks.vllm.report import FIGURES


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    monkeypatch.setattr(servers, "write_models", lambda *_: None)


@pytest.mark.usefixtures("installed")
def test_what_was_measured_before_the_time_was_over_is_printed_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def measure(
        _models: Path, _folder: Path, _plan: vllm.Plan, sides: list[vllm.Side], advance: Callable[[], None]
    ) -> None:
        figures = {figure.name: 0.25 for figure in FIGURES}
        sides += [vllm.Side("kvd", "pinned", [figures]), vllm.Side("NixlConnector", "pinned", [figures])]
        advance()
        raise TimeoutError

    monkeypatch.setattr(vllm, "measure", measure)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert bench_vllm.main(["--json", str(tmp_path / "figures.json")]) == 2
    said = capsys.readouterr()
    assert "NixlConnector" in said.out
    assert "ended before the last round: TimeoutError" in said.err
    assert '"rounds"' in (tmp_path / "figures.json").read_text()


@pytest.fixture
def plans(installed: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[vllm.Plan]:
    """What is measured from now on, in no time."""
    found: list[vllm.Plan] = []

    async def measure(
        _models: Path, _folder: Path, plan: vllm.Plan, sides: list[vllm.Side], _advance: Callable[[], None]
    ) -> None:
        found.append(plan)
        sides.append(vllm.Side("kvd", "pinned", [{figure.name: 0.25 for figure in FIGURES}]))

    monkeypatch.setattr(vllm, "measure", measure)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return found


def test_each_kind_of_groups_is_one_more_pair(plans: list[vllm.Plan], capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_vllm.main([]) == 0
    assert bench_vllm.main(["--groups", "session", "cgroup", "shared", "cgroup"]) == 0
    assert [(plan.groups, plan.pairs) for plan in plans] == [(("session",), 3), (("session", "cgroup", "shared"), 5)]
    assert "kvd" in capsys.readouterr().out


def test_a_plan_may_have_one_placement_more_requests_and_kills(plans: list[vllm.Plan]) -> None:
    assert bench_vllm.main(["--placements", "pinned", "--arrivals", "20", "--kills"]) == 0
    assert [(plan.placements, plan.arrivals, plan.kills) for plan in plans] == [(("pinned",), 20, True)]


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    "flags",
    [
        ("--rounds", "0"),
        ("--concurrent", "4", "0"),
        ("--prompt-tokens", "9999"),
        ("--arrivals", "0"),
        ("--arrivals", "21"),
    ],
)
def test_a_plan_that_measures_nothing_is_refused(flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_vllm.main(flags) == 2
    assert flags[0] in capsys.readouterr().err
