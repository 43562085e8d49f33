import errno
import os
import signal
import subprocess
import sys

import pytest

from kvd.cli.main import main
from tests.support.patience import PATIENCE


@pytest.mark.real
@pytest.mark.parametrize(
    ("command", "missing", "extra"),
    [("demo", "torch", "demo"), ("plan", "numpy", "daemon"), ("router", "aiohttp", "router")],
)
def test_a_command_says_which_extra_brings_what_it_lacks(command, missing, extra):
    code = f"import sys; sys.modules[{missing!r}] = None; from kvd.cli.main import main; sys.exit(main([{command!r}]))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert run.returncode == 2
    assert run.stderr == f"kvd {command}: {missing} is not installed: pip install '.[{extra}]' in a clone of kvd\n"


@pytest.mark.parametrize("value", ["nan", "inf", "1e300", "-1", "soon"])
@pytest.mark.parametrize("flag", ["status --timeout", "top --interval", "drain --wait", "bench --seconds"])
def test_a_time_that_cannot_be_waited_for_is_refused_with_its_flag(flag, value, capsys):
    command, name = flag.split()
    with pytest.raises(SystemExit) as ended:
        main([command, f"{name}={value}"])
    assert ended.value.code == 2
    assert f"argument {name}: {value!r} must be from 0 to 86400 seconds" in capsys.readouterr().err


@pytest.fixture
def key(tmp_path):
    assert main(["keys", "generate", str(tmp_path / "key"), "--name", "a"]) == 0
    return str(tmp_path / "key")


def show(key, stdout):
    """A command that prints a line."""
    command = [sys.executable, "-m", "kvd.cli.main", "keys", "show", key, "--name", "a"]
    return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=PATIENCE, check=False)


@pytest.mark.real
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_has_left_ends_a_command_silently(key, monkeypatch, unbuffered):
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    reader, writer = os.pipe()
    os.close(reader)
    run = show(key, writer)
    os.close(writer)
    assert (run.returncode, run.stderr) == (128 + signal.SIGPIPE, "")


@pytest.mark.real
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_cannot_be_written_is_an_error_in_one_line(key, monkeypatch, unbuffered):
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    with open("/dev/full", "w") as full:
        run = show(key, full)
    said = "kvd keys: cannot write to standard output: No space left on device\n"
    assert (run.returncode, run.stderr) == (2, said)


def test_ctrl_c_ends_a_command_as_the_signal_would(key, monkeypatch, capsys):
    def interrupted(_path):
        raise KeyboardInterrupt

    monkeypatch.setattr("kvd.net.keys.load", interrupted)
    assert main(["keys", "show", key, "--name", "a"]) == 128 + signal.SIGINT
    assert capsys.readouterr().err == ""


def test_what_fails_for_another_reason_is_a_defect_and_shown_as_one(key, monkeypatch):
    def failing(_path):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("kvd.net.keys.load", failing)
    with pytest.raises(OSError, match="Input/output error"):
        main(["keys", "show", key, "--name", "a"])


@pytest.mark.real
@pytest.mark.parametrize("closed", ["2>&-", "<&- >&- 2>&-"])
def test_standard_streams_that_are_closed_are_opened_on_nothing(key, tmp_path, closed):
    code = f"""
import os, sys
from kvd.cli.main import main
status = main(["keys", "show", {key!r}, "--name", "a"])
from kvd.daemon.logs import configure
configure("info", "auto")
with open({str(tmp_path / "said")!r}, "w") as file:
    print(status, os.readlink("/proc/self/fd/2"), os.get_inheritable(2), file.fileno() > 2, file=file)
"""
    subprocess.run(["sh", "-c", f'"$@" {closed}', "sh", sys.executable, "-c", code], timeout=PATIENCE, check=True)
    assert (tmp_path / "said").read_text() == "0 /dev/null True True\n"
