import msgspec
import pytest

from kvd.errors import BadRequest
from kvd.protocol.status import Totals, decode

TOTALS = Totals(1.0, 0, 0, {}, 0, 0, {"0.5": 1, "+Inf": 2})


@pytest.mark.parametrize("report", [b"", b"[]", b"{}", b'{"daemon": "\xff"}', b'{"unknown": "\xff"}'])
def test_what_is_no_status_is_refused(report):
    with pytest.raises(BadRequest, match="this is no status of this release"):
        decode(report)


def test_bounds_of_buckets_are_numbers():
    report = msgspec.json.encode(TOTALS)
    assert msgspec.json.decode(report, type=Totals) == TOTALS
    with pytest.raises(msgspec.ValidationError, match="could not convert string to float: 'abc'"):
        msgspec.json.decode(report.replace(b"+Inf", b"abc"), type=Totals)
