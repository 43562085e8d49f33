import os
from pathlib import Path

import pytest

from kvd.bench.pair import Pair


@pytest.mark.real
def test_daemons_run_where_the_command_that_they_are_started_with_puts_them(tmp_path: Path) -> None:
    core = max(os.sched_getaffinity(0))
    with Pair(tmp_path, daemons_within=["taskset", "--cpu-list", str(core)]) as pair:
        pair.pool("a", 2, 4096)  # both daemons serve
        for daemon in pair.daemons.values():
            assert Path(f"/proc/{daemon.pid}/comm").read_text().startswith("python")
            assert os.sched_getaffinity(daemon.pid) == {core}
