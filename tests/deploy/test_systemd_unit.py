import re
import shutil
import subprocess
from pathlib import Path

import pytest

from kvd.daemon.config import Config
from kvd.daemon.server import STOP_SECONDS

UNIT = Path(__file__).parents[2] / "deploy/systemd/kvd@.service"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_the_unit_is_as_confined_as_promised() -> None:
    ran = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--threshold=20", str(UNIT)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    if "unrecognized option" in ran.stderr:
        pytest.skip("systemd-analyze is older than 250: it cannot judge a unit offline")
    assert ran.returncode == 0, ran.stdout[-500:] + ran.stderr


def test_a_daemon_that_is_killed_again_and_again_comes_back_and_takes_no_more_than_its_share() -> None:
    text = UNIT.read_text()
    assert re.findall(r"^StartLimit\w+=.*$", text, re.MULTILINE) == ["StartLimitIntervalSec=0"]
    for wanted in ("MemoryMax", "TasksMax", "RestartSec", "RestartMaxDelaySec"):
        assert re.search(rf"^{wanted}=[1-9]", text, re.MULTILINE), wanted


def test_systemd_kills_no_daemon_within_the_grace_time_that_it_has_by_default() -> None:
    grace = Config.model_fields["drain_grace"].default
    (limit,) = re.findall(r"^TimeoutStopSec=(\d+)$", UNIT.read_text(), re.MULTILINE)
    assert int(limit) >= grace + STOP_SECONDS
