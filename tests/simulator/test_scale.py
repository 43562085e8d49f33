"""A daemon among many peers: what it keeps and answers does not grow with idle peers."""

import asyncio
import json

from benchmarks.scale.run import _Daemon, run
from kvd import limits
from kvd.protocol.worker import Status, StatusRequest


def test_many_peers_are_met_and_served():
    measured = run(peers=40, leases=300, rounds=20)
    assert (measured.peers, measured.leases) == (40, 300)
    assert measured.pull[0] > 0
    assert measured.status_bytes > 0


async def test_a_status_counts_leases_and_tells_of_so_many_peers_at_most():
    daemon = _Daemon(asyncio.get_running_loop())
    asker = await daemon.worker(1)
    await daemon.meet(2 * limits.MAX_REPORTED_PEERS)
    await daemon.fill(2, 30)
    answer = await asker.ask(StatusRequest(1), Status)
    report = json.loads(answer.report)
    assert len(report["handshake"]) == limits.MAX_REPORTED_PEERS
    assert (report["leases"]["active"], report["leases"]["claimed"], report["leases"]["claims_held"]) == (30, 30, 30)
    daemon.consumers.leave()
