import os
from pathlib import Path

import pytest

from kvd.bench.spinners import Spinners
from kvd.cli.main import main
from tests.support.fleet import until

USER, KERNEL = 11, 12


def processor_time(pid: int, mode: int) -> int:
    """In ticks of the clock."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[mode])


def children() -> set[int]:
    return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


@pytest.mark.real
@pytest.mark.parametrize(("yielding", "mode"), [(False, USER), (True, KERNEL)])
def test_spinners_compute_or_yield_without_a_pause_and_are_gone_after(
    tmp_path: Path, yielding: bool, mode: int
) -> None:
    before = children()
    with Spinners(2, tmp_path, yielding=yielding):
        started = children() - before
        assert len(started) == 2
        for _ in until("both have computed"):
            if all(processor_time(pid, mode) > 20 for pid in started):
                break
    assert children() == before


def test_yielding_without_processes_that_yield_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--yield"]) != 0
    assert "--yield is about the processes of --busy" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("within", "reason"), [("'", "No closing quotation"), ("nocmd -x", "there is no command 'nocmd'")]
)
def test_a_command_that_cannot_be_run_is_refused(within: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "--within", within])
    assert reason in capsys.readouterr().err
