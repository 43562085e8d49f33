import argparse
import json
import os
import signal

import pytest

from kvd.cli import demo
from kvd.engines.demo.report import Amount, make_report
from kvd.engines.demo.router import Request
from kvd.processes import ProcessEndedError


def parsed(*flags):
    parser = argparse.ArgumentParser()
    demo.add_parser(parser.add_subparsers())
    return parser.parse_args(["demo", *flags])


def report(tokens):
    request = Request("r", [1, 2], pull_started=1.0, pull_ended=2.0, tokens=tokens)
    return make_report([request], [Amount(100, 2)], [[7, 8]])


@pytest.mark.parametrize(("tokens", "status"), [([7, 8], 0), ([7, 9], demo.TOKENS_DIFFER)])
def test_the_exit_status_says_whether_every_token_is_right(monkeypatch, capsys, tokens, status):
    monkeypatch.setattr(demo, "_demo", lambda *_: (report(tokens), []))
    assert demo.run(parsed("--json")) == status
    assert json.loads(capsys.readouterr().out)["total"]["tokens_equal"] is (status == 0)


def test_a_process_that_ends_early_is_shown_and_is_no_wrong_token(monkeypatch, capsys):
    def fail(*_):
        raise ProcessEndedError("decode-daemon ended with signal SIGKILL; the end of its log:\nlast words")

    monkeypatch.setattr(demo, "_demo", fail)
    assert demo.run(parsed()) == demo.COULD_NOT_RUN
    shown = capsys.readouterr()
    assert "decode-daemon ended with signal SIGKILL" in shown.err
    assert shown.err.endswith("last words\n")
    assert shown.out == ""


def test_what_cannot_be_mapped_is_refused_before_anything_is_started(monkeypatch, capsys):
    monkeypatch.setattr(demo, "_serve", lambda *_: pytest.fail("it was started"))
    flags = parsed("--requests", "1", "--producer-block-size", "48", "--consumer-block-size", "32")
    assert demo.run(flags) == demo.COULD_NOT_RUN
    assert "source has 48, destination has 32" in capsys.readouterr().err


def test_sigterm_leaves_by_the_way_that_cleans_up(monkeypatch):
    folders = []

    def killed(_args, folder, _console):
        folders.append(folder)
        assert folder.is_dir()
        os.kill(os.getpid(), signal.SIGTERM)
        pytest.fail("it went on")

    monkeypatch.setattr(demo, "_demo", killed)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as left:
        demo.run(parsed())
    assert left.value.code == 128 + signal.SIGTERM
    assert not folders[0].exists()
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (("--tokens", "1"), "argument --tokens: 1: must be 2 or more"),
        (("--requests", "0"), "argument --requests: 0: must be 1 or more"),
        (("--layout", "fancy"), "argument --layout: invalid choice: 'fancy'"),
    ],
)
def test_a_flag_that_makes_no_sense_is_refused_with_its_value(capsys, flags, text):
    with pytest.raises(SystemExit):
        parsed(*flags)
    assert text in capsys.readouterr().err
