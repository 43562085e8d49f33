"""`python -m benchmarks.sglang` around servers that are faked."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.sglang import __main__ as command


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """The ways of serving that were measured: nixl takes twice as long as the others."""
    asked: list[Sequence[str]] = []

    async def measure_all(
        _: Path, names: Sequence[str], prompts: Sequence[int], rounds: int, __: float
    ) -> dict[str, command.Side]:
        asked.append(names)
        sides = {name: command.Side() for name in names}
        for name, tokens in ((name, tokens) for name in names for tokens in prompts):
            for _ in range(rounds):
                sides[name].add(tokens, tokens / 1000 * (1 + (name == command.NIXL)), tokens / 100)
        return sides

    monkeypatch.setattr(command, "write_models", lambda *_: None)
    monkeypatch.setattr(command, "measure_all", measure_all)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: object())
    return asked


def test_what_sglang_took_is_printed_as_a_table_with_ratios(
    measured: list[Sequence[str]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    found = tmp_path / "sides.json"
    assert command.main(["--prompts", "100", "500", "--rounds", "3", "--json", str(found)]) == 0
    said = capsys.readouterr().out
    assert measured == [["kvd", "nixl", "one server"]]
    assert "medians of 3 rounds" in said
    assert "| prompt |  | kvd | nixl | one server | kvd / nixl | kvd / one server |" in said
    assert "| 100 tokens, 13 MB | first token | 100 ms (100 to 100) | 200 ms (200 to 200) |" in said
    assert "0.50 (0.50 to 0.50)" in said
    assert json.loads(found.read_text())["sides"]["kvd"]["first_token"]["500"] == [0.5, 0.5, 0.5]


def test_kvd_is_measured_beside_one_server_where_nixl_does_not_start(measured: list[Sequence[str]]) -> None:
    assert command.main(["--without-nixl", "--rounds", "1"]) == 0
    assert measured == [["kvd", "one server"]]


@pytest.mark.parametrize("wrong", [["--prompts", "5000"], ["--prompts", "0"], ["--rounds", "0"]])
def test_what_cannot_be_measured_is_refused(
    wrong: list[str], measured: list[Sequence[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(wrong) == 2
    assert "--prompts must be 1 to" in capsys.readouterr().err
    assert measured == []
