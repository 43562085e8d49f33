"""`kvd demo` with real daemons and engines: every token is that of a single engine."""

import json
import subprocess
import sys

import pytest

from tests.support.patience import NEVER_LOST, PATIENCE

pytestmark = pytest.mark.real

FLAGS = {
    "as it comes": (),
    "two ranks to one, of other blocks": (
        *("--producer-tp", "2", "--consumer-tp", "1", "--layout", "flashinfer-hnd"),
        *("--producer-block-size", "32", "--consumer-block-size", "16"),
    ),
}


GPU = ("--device", "cuda:0", "--producer-tp", "2", "--consumer-tp", "1")


def gives_the_tokens_of_a_single_engine_and_shows_when_blocks_move(monkeypatch, folder, flags):
    for name, seconds in NEVER_LOST.items():
        monkeypatch.setenv(f"KVD_{name.upper()}", seconds)
    command = [sys.executable, "-m", "kvd.cli.main", "demo", "--requests", "6", "--tokens", "3", "--json", *flags]
    command += ["--plot", str(folder / "demo.png")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=2 * PATIENCE, check=False)
    assert ended.returncode == 0, ended.stderr
    report = json.loads(ended.stdout)
    assert report["total"]["tokens_equal"]
    assert len(report["requests"]) == 6
    assert all(request["bytes"] > 0 for request in report["requests"])
    in_turn, at_once = report["timelines"]
    assert len(in_turn["complete"]) == 3  # nothing, all, and all in the end
    assert len(at_once["complete"]) > 3
    for line in (in_turn, at_once):
        assert line["read"][-1][1] == line["complete"][-1][1]
    assert (folder / "demo.png").stat().st_size > 10_000


@pytest.mark.sample(2)
@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_the_demo_gives_the_tokens_of_a_single_engine_and_shows_when_blocks_move(monkeypatch, tmp_path, flags):
    gives_the_tokens_of_a_single_engine_and_shows_when_blocks_move(monkeypatch, tmp_path, flags)


@pytest.mark.slow
def test_the_demo_gives_the_same_tokens_with_its_pools_on_a_gpu(monkeypatch, tmp_path, standin):
    for name, value in standin.environment.items():
        monkeypatch.setenv(name, value)
    gives_the_tokens_of_a_single_engine_and_shows_when_blocks_move(monkeypatch, tmp_path, GPU)
