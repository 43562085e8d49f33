"""The measurements of offers that grow: one with real daemons on a small load, one around servers that are faked."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import growing
from benchmarks.vllm import growing as of_vllm
from benchmarks.vllm import servers


@pytest.mark.real
def test_waits_are_measured_with_both_rules(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    small = ["--streams", "3", "--chunks", "2", "--chunk-mib", "1", "--period-ms", "5", "--rounds", "2"]
    assert growing.main([*small, "--json", str(tmp_path / "waits.json")]) == 0
    said = capsys.readouterr().out
    assert "waited-for: close to done, median" in said
    assert "plainly-fair: close to done, median" in said
    assert "of 6" in said
    assert "waited-for" in (tmp_path / "waits.json").read_text()


def test_what_vllm_took_is_printed_as_medians_and_ratios(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    async def measured(_folder: Path, prompts: Sequence[int], _rounds: int, _seconds: float) -> dict[str, of_vllm.Side]:
        sides = {name: of_vllm.Side() for name in (of_vllm.AT_ONCE, of_vllm.IN_TURN, of_vllm.NIXL)}
        for tokens in prompts:
            sides[of_vllm.AT_ONCE].add(tokens, 0.0, 1.04, 1.14, 0.01)
            sides[of_vllm.IN_TURN].add(tokens, 0.0, 1.0, 1.0 + tokens / 1000, 0.01)
            sides[of_vllm.NIXL].add(tokens, 0.0, 1.0, 2.0, 0.01)
        return sides

    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    monkeypatch.setattr(servers, "write_models", lambda *_: None)
    monkeypatch.setattr(of_vllm, "measure_all", measured)
    assert of_vllm.main(["--json", str(tmp_path / "sides.json")]) == 0
    said = capsys.readouterr().out
    assert "kvd, both at once: end of prefill to first token 100 and 100 ms (x 1.00)" in said
    assert "kvd, one after the other: end of prefill to first token 500 and 3000 ms (x 6.00)" in said
    assert "a prefill of 3000 tokens takes 1040 ms while it is read, 1000 ms if nobody reads it (x 1.040)" in said
