"""A daemon's own part of a status, where there is no process."""

from kvd.protocol.status import ProcessStatus, Totals


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
