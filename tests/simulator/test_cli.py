from tests.simulator.__main__ import main
from tests.simulator.mutations import notifications_are_not_kept
from tests.simulator.run import run_seed


def test_seeds_without_a_violation_are_a_success(capsys):
    assert main(["--seeds", "4", "--from", "10"]) == 0
    assert "4 seeds from 10: no promise broken" in capsys.readouterr().out


def test_a_violation_is_shown_with_its_seed_and_trace(capsys, monkeypatch):
    notifications_are_not_kept(monkeypatch)
    assert main(["--seeds", "200"]) == 1
    shown = capsys.readouterr().out
    assert "VIOLATION" in shown
    assert "--seed" in shown


def test_a_trace_can_be_printed(capsys):
    assert main(["--seed", "3", "--trace"]) == 0
    shown = capsys.readouterr().out
    assert "offer" in shown
    assert run_seed(3).trace_hash in shown
