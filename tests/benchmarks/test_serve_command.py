"""`python -m benchmarks.vllm.serve` around a measurement that is faked."""

import importlib.util
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.vllm import servers
from benchmarks.vllm.serve import __main__ as serve_command
from benchmarks.vllm.serve import run as serve
from tests.vllm.testbed.http import HttpError


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def measure(_: Path, plan: serve.Plan, found: list[serve.Measured], advance: Callable[[], None]) -> None:
        for system in plan.systems:
            for workload in serve.WORKLOADS:
                for rate in plan.rates:
                    found.append(serve.Measured(system, workload.name, rate, 9, 1, 70.0, 120.0, 1450.0, 15.0, 40.0))
                    advance()
        if plan.window == 13:
            raise HttpError(0, "vllm bench serve ended with status 1")

    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    monkeypatch.setattr(servers, "write_models", lambda *_: None)
    monkeypatch.setattr(serve, "measure", measure)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


@pytest.mark.usefixtures("faked")
def test_each_workload_rate_and_system_is_a_line_and_a_point(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ["--json", str(tmp_path / "figures.json"), "--plot", str(tmp_path / "figures.png")]
    assert serve_command.main(["--rates", "4", "1", *files]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "120 / 1,450 ms" in line]
    assert len(lines) == 3 * 2 * 3
    assert [line.split("|")[2].strip() for line in lines[:6]] == ["1", "1", "1", "4", "4", "4"]
    assert all("15.0 / 40.0 ms" in line and "1 of 10" in line for line in lines)
    assert (tmp_path / "figures.png").stat().st_size > 10_000
    assert '"first_token_p99"' in (tmp_path / "figures.json").read_text()


@pytest.mark.usefixtures("faked")
def test_what_was_measured_before_a_failure_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve_command.main(["--window", "13"]) == 2
    said = capsys.readouterr()
    assert "| five turns of 250 | 2 | one server |" in said.out
    assert "vllm bench serve ended with status 1" in said.err


@pytest.mark.usefixtures("faked")
@pytest.mark.parametrize("flags", [("--rates", "0"), ("--window", "0"), ("--seconds", "-1")])
def test_a_plan_that_measures_nothing_is_refused(flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert serve_command.main(flags) == 2
    assert flags[0] in capsys.readouterr().err


def test_percentiles_of_few_values() -> None:
    assert serve.percentile([0.25], 99) == 250
    assert serve.percentile([0.1, 0.2, 0.3], 50) == pytest.approx(200)
    assert math.isnan(serve.percentile([], 50))
