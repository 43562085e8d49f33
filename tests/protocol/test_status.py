import msgspec
import pytest

from kvd.errors import BadRequest
from kvd.protocol.status import LeaseStatus, PullStatus, StatusReport, Totals, decode
from tests.support.statuses import process_status

STATUS = StatusReport(
    **msgspec.structs.asdict(process_status("d")) | {"totals": Totals(1.0, 0, 0, {}, 0, 0, {"0.5": 1, "+Inf": 2})},
    workers=[],
    pools=[],
    handshake=[],
    leases=LeaseStatus(0, 0, 0, 0),
    scheduler=PullStatus(0, {}, 0, {}),
    completion={},
)


@pytest.mark.parametrize("report", [b"", b"[]", b"{}", b'{"daemon": "\xff"}', b'{"unknown": "\xff"}'])
def test_what_is_no_status_is_refused(report):
    with pytest.raises(BadRequest, match="this is no status of this release"):
        decode(report)


def test_bounds_of_buckets_are_numbers():
    report = msgspec.json.encode(STATUS)
    assert decode(report) == STATUS
    with pytest.raises(BadRequest, match="could not convert string to float: 'abc'"):
        decode(report.replace(b"+Inf", b"abc"))
