import os
from pathlib import Path

import pytest

from kvd.bench.spinners import Spinners
from kvd.cli.main import main
from tests.support.fleet import until


def processor_time(pid: int) -> int:
    """In ticks of the clock, in user mode."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11])


def children() -> set[int]:
    return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


@pytest.mark.real
def test_spinners_compute_without_a_pause_and_are_gone_after(tmp_path: Path) -> None:
    before = children()
    with Spinners(2, tmp_path):
        started = children() - before
        assert len(started) == 2
        for _ in until("both have computed"):
            if all(processor_time(pid) > 20 for pid in started):
                break
    assert children() == before


def test_a_number_of_spinners_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--busy", "-1"]) != 0
    assert "--busy -1: must be 0 or more" in capsys.readouterr().err
