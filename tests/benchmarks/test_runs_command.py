"""`python -m benchmarks.runs`, with commands in the place of `kvd`."""

import json
import stat
import sys
from pathlib import Path

import pytest

from benchmarks import runs

SIZE = {
    "case": {"block_bytes": 262144, "count": 64, "scattered": True},
    "bytes": 16 << 20,
    "ratio": 0.5,
    "kvd": 2e-3,
    "added_seconds": 1e-3,
}
LOAD = {"big_pull": 0.1, "status_p99": 2e-3, "small_beside": 5e-4}
RATE = {"pulls": 9000, "seconds": 3.0}


def kvd(folder: Path, name: str, body: str) -> Path:
    """A command; its last argument is the file that it writes, `runs` the folder's list of those who ran."""
    command = folder / name
    head = (
        f"import json, pathlib, sys\n(ran := pathlib.Path({str(folder)!r}) / 'ran').open('a').write({name!r} + ' ')\n"
    )
    command.write_text(f"#!{sys.executable}\n{head}{body}\n")
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    return command


def test_what_a_run_says_is_named_with_its_unit() -> None:
    size = "16 MiB in 64 x 256 KiB scattered"
    assert runs.figures({"machine": {}, "transfers": [SIZE]}) == {
        f"{size}: throughput / raw NIXL's": 0.5,
        f"{size}: a pull, us": pytest.approx(2000),
        f"{size}: added to raw NIXL, us": pytest.approx(1000),
    }
    assert runs.figures({"load": LOAD})["status beside it, p99, ms"] == pytest.approx(2)
    assert runs.figures({"rate": RATE}) == {"pulls of one block a second": 3000}


def test_both_run_in_turns_and_what_was_told_is_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    writes = (
        "assert sys.argv[1:4] == ['bench', '--rate', '--json']\n"
        "assert pathlib.Path.cwd() == pathlib.Path(sys.argv[-1]).parent  # not where Python finds this checkout\n"
        "pathlib.Path(sys.argv[-1]).write_text('{}')"
    )
    monkeypatch.setattr(runs, "_HERE", kvd(tmp_path, "new", writes.format(json.dumps({"rate": RATE}))))
    old = kvd(tmp_path, "old", writes.format(json.dumps({"rate": {**RATE, "pulls": 3000}})))
    file = tmp_path / "figures.json"
    assert runs.main(["--runs", "3", "--beside", str(old), "--json", str(file), "--", "--rate"]) == 0
    assert (tmp_path / "ran").read_text().split() == ["new", "old", "old", "new", "new", "old"]
    printed = capsys.readouterr().out
    assert "3,000 (3,000 to 3,000)" in printed
    assert "3.00 (3.00 to 3.00)" in printed
    assert json.loads(file.read_text())["runs"]["beside"] == [{"pulls of one block a second": 1000}] * 3


def test_a_run_that_fails_is_told_with_what_it_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runs, "_HERE", kvd(tmp_path, "new", "sys.exit('no room')"))
    assert runs.main(["--runs", "1"]) == 2
    assert "bench ended with status 1: no room" in capsys.readouterr().err


def test_a_command_that_is_none_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    writes = f"pathlib.Path(sys.argv[-1]).write_text({json.dumps({'rate': RATE})!r})"
    monkeypatch.setattr(runs, "_HERE", kvd(tmp_path, "new", writes))
    assert runs.main(["--runs", "1", "--beside", str(tmp_path / "kvd")]) == 2
    assert f"{tmp_path / 'kvd'} cannot be run: " in capsys.readouterr().err


@pytest.mark.parametrize("body", ["", "pathlib.Path(sys.argv[-1]).write_text('{\"gpu\": {}}')"])
def test_what_it_cannot_compare_is_refused(
    body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runs, "_HERE", kvd(tmp_path, "new", body))
    assert runs.main(["--runs", "1", "--", "--device", "cuda:0"]) == 2
    assert "`kvd bench --device cuda:0` measures nothing that can be compared" in capsys.readouterr().err
