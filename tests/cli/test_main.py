import argparse
import errno
import json
import os
import signal
import subprocess
import sys

import pytest

from kvd.bench import report, transfers
from kvd.cli import bench
from kvd.cli.arguments import output_file
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
@pytest.mark.parametrize(
    "flag",
    [
        *("status --timeout", "top --interval", "drain --wait", "bench --seconds"),
        *("router --prefill-timeout", "router --decode-timeout"),
    ],
)
def test_a_time_that_cannot_be_waited_for_is_refused_with_its_flag(flag, value, capsys):
    command, name = flag.split()
    with pytest.raises(SystemExit) as ended:
        main([command, f"{name}={value}"])
    assert ended.value.code == 2
    assert f"argument {name}: {value!r} must be from 0 to 86400 seconds" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("router --prefill-timeout", "0", "'0' must be above 0 seconds"),
        ("router --decode-timeout", "0.0", "'0.0' must be above 0 seconds"),
        ("bench --seconds", "-0", "'-0' must be above 0 seconds"),
        ("bench --rounds", "0", "0: must be 1 or more"),
        ("bench --busy", "-1", "-1: must be 0 or more"),
        ("top --count", "-1", "-1: must be 0 or more"),
        ("top --count", "all", "invalid number value: 'all'"),
    ],
)
def test_a_number_with_which_nothing_can_be_done_is_refused_with_its_flag(flag, value, said, capsys):
    command, name = flag.split()
    with pytest.raises(SystemExit) as ended:
        main([command, f"{name}={value}"])
    assert ended.value.code == 2
    assert f"argument {name}: {said}" in capsys.readouterr().err


@pytest.fixture
def starts_nothing(monkeypatch):
    monkeypatch.setattr("kvd.processes.Child.start", lambda *_, **__: pytest.fail("it has started a process"))


@pytest.mark.usefixtures("starts_nothing")
@pytest.mark.parametrize("command", ["bench", "demo"])
def test_a_picture_that_cannot_be_drawn_is_refused_before_anything_is_measured(command, monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([command, "--plot", str(tmp_path / "picture.png")]) == 2
    said = f"kvd {command}: matplotlib is not installed: pip install '.[plot]' in a clone of kvd\n"
    assert capsys.readouterr().err == said


@pytest.mark.usefixtures("starts_nothing")
@pytest.mark.parametrize("flag", ["bench --json", "bench --plot", "demo --plot"])
@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("file/figures", "its folder cannot be made: File exists"),
        ("folder", "cannot be written"),
        (300 * "a", "cannot be written: File name too long"),
    ],
    ids=["below a file", "a folder", "too long a name"],
)
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(flag, place, said, tmp_path, capsys):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    command, name = flag.split()
    with pytest.raises(SystemExit):
        main([command, name, str(tmp_path / place)])
    assert f"argument {name}: '{tmp_path / place}': {said}" in capsys.readouterr().err


def test_the_folder_of_what_is_measured_is_made(tmp_path):
    path = tmp_path / "new" / "folder" / "figures.json"
    assert output_file(str(path)) == path
    assert path.parent.is_dir()
    assert not path.exists()


def test_figures_are_written_before_a_picture_of_them_is_drawn(monkeypatch, tmp_path):
    def failing(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(transfers, "measure", lambda *_: [])
    monkeypatch.setattr(report, "plot", failing)
    parser = argparse.ArgumentParser()
    bench.add_parser(parser.add_subparsers())
    files = ["--json", str(tmp_path / "figures.json"), "--plot", str(tmp_path / "picture.png")]
    with pytest.raises(OSError, match="No space left"):
        bench._transfers(None, parser.parse_args(["bench", *files]))
    assert json.loads((tmp_path / "figures.json").read_text())["transfers"] == []


@pytest.mark.parametrize("what", ["--load", "--rate"])
def test_no_picture_is_promised_of_what_has_none(what, tmp_path, capsys):
    assert main(["bench", what, "--plot", str(tmp_path / "picture.png")]) == 2
    assert "--plot draws throughputs, which neither --load nor --rate measures" in capsys.readouterr().err


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
