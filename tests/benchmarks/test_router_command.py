"""`python -m benchmarks.router`."""

import json
from pathlib import Path

import pytest

from benchmarks.router import __main__ as bench_router


def test_what_the_router_adds_is_the_difference_of_quantiles() -> None:
    measured = bench_router.Measured(direct=[0.001] * 100, routed=[0.002] * 98 + [0.005] * 2)
    figures = measured.as_dict()
    assert figures["added"] == pytest.approx({"p50": 1.0, "p99": 4.0}, abs=0.05)


@pytest.mark.real
@pytest.mark.parametrize("between", [[], ["--relay", "bytes"], ["--relay", "http"]])
def test_both_ways_are_measured_and_kept(
    between: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    assert bench_router.main(["--seconds", "0.2", "--busy", "0", "--json", str(file), *between]) == 0
    assert "10 requests each way, 50 a second" in capsys.readouterr().out
    figures = json.loads(file.read_text())["milliseconds"]
    assert set(figures) == {"direct", "routed", "added"}
    assert figures["direct"]["p50"] > 0
