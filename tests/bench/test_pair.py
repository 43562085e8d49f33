import os
from pathlib import Path

import pytest

from kvd.bench.pair import Pair
from kvd.cli.main import main


@pytest.mark.real
def test_daemons_run_where_the_command_that_they_are_started_with_puts_them(tmp_path: Path) -> None:
    core = max(os.sched_getaffinity(0))
    with Pair(tmp_path, daemons_within=["taskset", "--cpu-list", str(core)]) as pair:
        pair.pool("a", 2, 4096)  # both daemons serve
        for daemon in pair.daemons.values():
            assert Path(f"/proc/{daemon.pid}/comm").read_text().startswith("python")
            assert os.sched_getaffinity(daemon.pid) == {core}


@pytest.mark.real
def test_a_daemon_that_does_not_start_is_told_with_the_end_of_its_log(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--within", "bash -c 'echo first >&2; echo second >&2; false'"]) == 2
    told = "kvd bench: internal: bench-consumer ended with status 1; the end of its log:\nfirst\nsecond\n"
    assert told in capsys.readouterr().err
