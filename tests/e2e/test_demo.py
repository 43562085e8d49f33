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


def gives_the_tokens_of_a_single_engine(monkeypatch, flags):
    for name, seconds in NEVER_LOST.items():
        monkeypatch.setenv(f"KVD_{name.upper()}", seconds)
    command = [sys.executable, "-m", "kvd.cli.main", "demo", "--requests", "6", "--tokens", "3", "--json", *flags]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=2 * PATIENCE, check=False)
    assert ended.returncode == 0, ended.stderr
    report = json.loads(ended.stdout)
    assert report["total"]["tokens_equal"]
    assert len(report["requests"]) == 6
    assert all(request["bytes"] > 0 for request in report["requests"])


@pytest.mark.sample(2)
@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_the_demo_gives_the_tokens_of_a_single_engine(monkeypatch, flags):
    gives_the_tokens_of_a_single_engine(monkeypatch, flags)


@pytest.mark.slow
def test_the_demo_gives_the_same_tokens_with_its_pools_on_a_gpu(monkeypatch, standin):
    for name, value in standin.environment.items():
        monkeypatch.setenv(name, value)
    gives_the_tokens_of_a_single_engine(monkeypatch, GPU)
