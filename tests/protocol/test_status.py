import msgspec
import pytest

from kvd import limits
from kvd.errors import BadRequest
from kvd.protocol.status import Totals, decode
from tests.support.statuses import status_report

STATUS = status_report(Totals(1.0, 0, 0, {}, 0, 0, {"0.5": 1, "+Inf": 2}))
REPORT = msgspec.json.encode(STATUS)
NESTED = b'{"unknown":' + 100_000 * b"[" + 100_000 * b"]" + b"}"


@pytest.mark.parametrize("report", [b"", b"[]", b"{}", b'{"daemon": "\xff"}', b'{"unknown": "\xff"}', NESTED])
def test_what_is_no_status_is_refused(report):
    with pytest.raises(BadRequest, match="this is no status of this release"):
        decode(report)


def test_fields_of_other_releases_are_ignored():
    assert decode(REPORT[:-1] + b',"unknown":' + 5000 * b"1" + b"}") == STATUS


@pytest.mark.parametrize("count", [b"-1", b"9223372036854775808", b"1" + 400 * b"0"])
@pytest.mark.parametrize("field", [b'"read_bytes":0', b'"active":0', b'"pid":0', b'"0.5":1'])
def test_counts_have_63_bits(field, count):
    assert field in REPORT
    with pytest.raises(BadRequest, match="this is no status of this release: Expected `int`"):
        decode(REPORT.replace(field, field[:-1] + count))


def test_bounds_of_buckets_are_numbers():
    assert decode(REPORT) == STATUS
    with pytest.raises(BadRequest, match="could not convert string to float: 'abc'"):
        decode(REPORT.replace(b"+Inf", b"abc"))


@pytest.mark.parametrize(
    ("buckets", "why"),
    [
        ({"nan": 1}, "bounds"),
        ({"0.5": 1, "nan": 2}, "bounds"),
        ({"-inf": 1, "0.5": 2}, "bounds"),
        ({"1": 1, "0.5": 2}, "bounds"),
        ({"+Inf": 1}, "the first one is infinite"),
        ({"1e400": 1, "+Inf": 2}, "bounds"),
        ({"0.5": 2, "+Inf": 1}, "the counts of its buckets fall"),
    ],
)
def test_buckets_are_a_histogram(buckets, why):
    with pytest.raises(BadRequest, match=why):
        decode(msgspec.json.encode(status_report(Totals(1.0, 0, 0, {}, 0, 0, buckets))))


def test_a_refusal_quotes_a_bounded_part_of_a_report():
    with pytest.raises(BadRequest) as refused:
        decode(REPORT.replace(b"+Inf", 1_000_000 * b"x"))
    assert refused.value.text.endswith("xxx'")
    assert len(refused.value.text) == limits.MAX_ERROR_TEXT
