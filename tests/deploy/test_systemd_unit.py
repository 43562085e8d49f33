import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from kvd.daemon.config import Config, load
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


def test_the_daemon_has_no_interface_but_loopback_until_the_drop_in_names_the_one_of_its_peers() -> None:
    assert re.findall(r"^RestrictNetworkInterfaces=(.*)$", UNIT.read_text(), re.MULTILINE) == ["lo"]
    network = (UNIT.parent / "drop-ins/network.conf").read_text()
    assert len(re.findall(r"^RestrictNetworkInterfaces=\S+$", network, re.MULTILINE)) == 1
    variables = dict(re.findall(r"^Environment=KVD_(\w+)=(\S+)$", network, re.MULTILINE))
    flags = {name.lower(): value.replace("%i", "0") for name, value in variables.items()}
    config = load({**flags, "curve_key": "/k", "curve_peers": "/p"})
    assert config.unprotected_transport in config.listen
    listening = {9910 + instance for instance in range(10)} | {9920 + instance for instance in range(10)}
    first, last = map(int, config.transport_ports.split("-"))
    assert not listening & set(range(first, last + 1))


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_every_line_of_the_drop_ins_is_one_that_systemd_knows(tmp_path: Path) -> None:
    folder = tmp_path / "kvd@.service.d"
    folder.mkdir()
    unit = UNIT.read_text().replace("/opt/kvd/bin/kvd", "/bin/true")
    (tmp_path / "kvd@.service").write_text(unit)
    for drop_in in (UNIT.parent / "drop-ins").iterdir():
        shutil.copy(drop_in, folder)
    ran = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(tmp_path / "kvd@0.service")],
        env={"SYSTEMD_UNIT_PATH": f"{tmp_path}:", "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert not [line for line in ran.stderr.splitlines() if ".service.d/" in line], ran.stderr
