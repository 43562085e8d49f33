"""How much of the daemon one small pull within a host passes: what somebody has to read who follows it.

The bounds are what was counted last; whoever needs more of it should see that.
"""

import json
import signal
import sys
from pathlib import Path

import pytest

from tests.support.fleet import Fleet, send, until

FILES, TYPES = 34, 65
WALKED = Path(__file__).with_name("walked.py")


@pytest.fixture(scope="module")
def walk(tmp_path_factory):
    """What the consumer's daemon passes from a worker's request to its `done`, of a pull that is not the first."""
    folder = tmp_path_factory.mktemp("walk")
    out = folder / "walk.json"
    with Fleet(folder) as fleet:
        producer = fleet.daemon("p")
        consumer = fleet.daemon("d", within=(sys.executable, str(WALKED), str(out)))
        prefill, decode = fleet.worker(producer, "prefill"), fleet.worker(consumer, "decode")
        for name in ("first", "second"):
            for _ in until("what the pull before has left behind is acknowledged"):
                if not any(log["kept"] for log in decode.call("status")["completion"].values()):
                    break
            ticket = prefill.call("offer", name=name, ids=[1])
            send(consumer.child, signal.SIGUSR1)
            decode.call("status")  # by its answer the signal has been handled
            send(consumer.child, signal.SIGUSR1)
            decode.call("pull", name=name, ticket=ticket, ids=[2])
            outcome = decode.outcome(name)
            assert outcome["kind"] == "Done", outcome
        send(consumer.child, signal.SIGUSR2)
        for _ in until("the walk is written"):
            if out.exists():
                return json.loads(out.read_text())
    raise AssertionError("unreachable")


@pytest.mark.real
def test_a_small_pull_within_a_host_passes_few_files_and_types(walk):
    assert len(walk["files"]) <= FILES, walk["files"]
    assert len(walk["types"]) <= TYPES, walk["types"]


@pytest.mark.real
def test_two_calls_wait_in_mailboxes_between_the_workers_frame_and_its_done(walk):
    sends = "completion: CompletionActor._flush"  # which waits there only if something else does
    calls = [call for call in walk["calls"] if not call.endswith(".probe") and call != sends]
    assert calls == ["gateway: GatewayActor.requested", "scheduler: Transfers.landed"]
