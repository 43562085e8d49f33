"""How much of the daemon one small pull within a host passes: what somebody has to read who follows it."""

import json
import signal
import sys
from pathlib import Path

import pytest

from tests.support.fleet import send, until

FILES, TYPES, CALLS = 35, 40, 2
WALKED = Path(__file__).with_name("walked.py")


@pytest.fixture
def walk(fleet, tmp_path):
    """What the consumer's daemon passes from a worker's request to its `done`, of a pull that is not the first."""
    out = tmp_path / "walk.json"
    producer = fleet.daemon("p")
    consumer = fleet.daemon("d", within=(sys.executable, str(WALKED), str(out)))
    prefill, decode = fleet.worker(producer, "prefill"), fleet.worker(consumer, "decode")
    for number in range(3):
        ticket = prefill.call("offer", name=f"r{number}", ids=[1])
        if number:
            send(consumer.child, signal.SIGUSR1)
            decode.call("status")
            send(consumer.child, signal.SIGUSR1)
        decode.call("pull", name=f"r{number}", ticket=ticket, ids=[2])
        assert decode.outcome(f"r{number}")["kind"] == "Done"
    send(consumer.child, signal.SIGUSR2)
    for _ in until("the walk is written"):
        if out.exists():
            return json.loads(out.read_text())
    raise AssertionError("unreachable")


def test_a_small_pull_within_a_host_passes_few_files_types_and_mailboxes(walk):
    print(json.dumps(walk, indent=1))
