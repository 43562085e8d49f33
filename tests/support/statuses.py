"""Statuses where there is no process: a daemon's own part, and a whole one."""

import msgspec

from kvd.protocol.status import LeaseStatus, ProcessStatus, PullStatus, StatusReport, Totals


def process_status(daemon: str) -> ProcessStatus:
    """That of a daemon which has done nothing yet."""
    return ProcessStatus(
        daemon=daemon,
        version="0",
        pid=0,
        address="",
        http="",
        device="cpu",
        ready=True,
        not_ready={},
        totals=Totals(0.0, 0, 0, {}, 0, 0, {}),
    )


def status_report(totals: Totals) -> StatusReport:
    """The status of a daemon with these counters and nothing else."""
    return StatusReport(
        **msgspec.structs.asdict(process_status("d")) | {"totals": totals},
        workers=[],
        pools=[],
        handshake=[],
        leases=LeaseStatus(0, 0, 0, 0),
        scheduler=PullStatus(0, {}, 0, {}),
        completion={},
    )
