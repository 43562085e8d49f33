"""`python -m benchmarks.vllm.turns` around a measurement that is faked."""

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.vllm import servers, turns


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def measure(_: Path, plan: turns.Plan, advance: Callable[[], None]) -> list[turns.Turn]:
        advance()
        if plan.seconds == 1:
            return [turns.Turn()]
        times = {turns.KEPT: [0.1, 0.2, 0.3], turns.COMPUTED: [0.5, 0.4, 0.3]}
        tokens = {turns.KEPT: [201.0], turns.COMPUTED: [600.0]}
        return [turns.Turn(times, tokens) for _ in range(plan.turns)]

    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    monkeypatch.setattr(servers, "write_models", lambda *_: None)
    monkeypatch.setattr(turns, "measure", measure)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


@pytest.mark.usefixtures("faked")
def test_each_turn_is_a_line_with_the_ratio_of_medians(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert turns.main(["--turns", "2", "--json", str(tmp_path / "figures.json")]) == 0
    said = capsys.readouterr().out
    lines = [line for line in said.splitlines() if "201 tokens | 600 tokens" in line]
    assert len(lines) == 2
    assert all("200 ms" in line and "400 ms" in line and "0.50" in line for line in lines)
    assert "turn 2 takes 0.50 of its time without D to P; goal 0.6: met" in said
    assert '"first_token"' in (tmp_path / "figures.json").read_text()


@pytest.mark.usefixtures("faked")
@pytest.mark.parametrize("flags", [["--turns", "0"], ["--turns", "9", "--asked", "500"]])
def test_conversations_that_no_model_here_can_have_are_refused(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert turns.main(flags) == 2
    assert "bad_config" in capsys.readouterr().err


@pytest.mark.usefixtures("faked")
def test_a_time_in_which_no_round_ends_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert turns.main(["--seconds", "1"]) == 2
    assert "raise --seconds" in capsys.readouterr().err
