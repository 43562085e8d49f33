import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvd.cli.main import main
from kvd.doctor import Level
from kvd.doctor.loopback import check_transfer
from kvd.net.inquiry import Inquiry
from kvd.protocol.status import decode
from tests.support.fleet import Fleet, until
from tests.support.patience import PATIENCE

pytestmark = pytest.mark.real
BLOCKS = [1, 2, 3, 4]


def kvd(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "kvd.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)


def test_status_and_top_show_a_pull_and_the_path_that_it_took_to_one_who_never_attached(
    fleet: Fleet, capsys: pytest.CaptureFixture
) -> None:
    source, target = fleet.daemon("p"), fleet.daemon("d")
    prefill, decode_worker = fleet.worker(source, "prefill-0"), fleet.worker(target, "decode-0")
    prefill.call("fill", ids=BLOCKS, value=7)
    decode_worker.call("pull", name="r", ticket=prefill.call("offer", name="o", ids=BLOCKS), ids=BLOCKS)
    assert decode_worker.outcome("r")["kind"] == "Done"

    with Inquiry(str(target.socket)) as inquiry:
        assert inquiry.credentials.pid == target.child.pid
        status = decode(inquiry.status(PATIENCE))
    assert status.ready
    assert [pool.worker for pool in status.pools] == ["decode-0"]
    assert status.totals.pulls == {"done": 1}
    assert status.totals.read_bytes == len(BLOCKS) * 4096
    assert status.handshake[0].path, "UCX said which lanes it chose"

    asked = ["--socket", str(target.socket), "--timeout", str(PATIENCE)]
    for _ in until("the daemon has looked for how long its threads waited"):
        assert main(["status", *asked]) == 0
        shown = capsys.readouterr().out
        if "threads waited for a processor: loop " in shown:
            break
    assert "decode-0" in shown
    assert "ready" in shown
    assert main(["top", *asked, "--count", "2", "--interval", "0.05", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["pulls_per_second"] for line in lines] == [{}, {"done": 0.0}]
    assert main(["top", *asked, "--count", "2", "--interval", "0.05"]) == 0
    assert "bytes in" in capsys.readouterr().out


def test_where_no_daemon_is_the_commands_say_so_and_end_with_2(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for command in ("status", "top", "drain"):
        assert main([command, "--socket", str(tmp_path / "none.sock")]) == 2
        assert "no daemon at" in capsys.readouterr().err


def test_a_daemon_that_hangs_is_reported_in_time(fleet: Fleet, capsys: pytest.CaptureFixture) -> None:
    daemon = fleet.daemon("hung")
    daemon.serving()
    with daemon.paused():
        assert main(["status", "--socket", str(daemon.socket), "--timeout", "0.2"]) == 2
        assert "did not answer in time" in capsys.readouterr().err
        assert main(["doctor", "--socket", str(daemon.socket), "--timeout", "0.2", "--no-transfer", "--json"]) == 1
    findings = json.loads(capsys.readouterr().out)
    assert [finding["level"] for finding in findings if finding["subject"] == "daemon"] == ["broken"]


def test_the_doctor_moves_bytes_between_two_processes_and_names_the_lanes(tmp_path: Path) -> None:
    ran = kvd("doctor", "--json", "--socket", str(tmp_path / "none.sock"))
    assert ran.returncode == 0, ran.stderr
    findings = {finding["subject"]: finding for finding in json.loads(ran.stdout)}
    assert {"memlock", "huge pages", "RDMA", "UCX"} <= set(findings)
    assert "GB/s" in findings["same-host copy"]["text"]
    assert findings["network transfer"]["level"] == "ok"
    assert " over tcp/lo, " in findings["network transfer"]["text"]
    assert all(finding["fix"] for finding in findings.values() if finding["level"] in ("slow", "broken"))


def test_a_transfer_that_does_not_end_is_reported_in_time() -> None:
    (finding,) = check_transfer(0.01)
    assert finding.level is Level.BROKEN
    assert "did not end within 0.01 s" in finding.text
