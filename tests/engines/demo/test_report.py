import io
import json

from rich.console import Console

from kvd.engines.demo.report import Amount, as_json, as_table, make_report
from kvd.engines.demo.router import Request


def requests():
    return [
        Request("a", [1] * 4, pull_started=10.0, pull_ended=12.0, tokens=[5, 6]),
        Request("b", [1] * 6, pull_started=11.0, pull_ended=11.5, tokens=[7, 8]),
        Request("c", [1] * 8, pull_started=20.0, pull_ended=21.0, tokens=[9, 9]),
    ]


AMOUNTS = [Amount(4_000_000_000, 2), Amount(1_000_000_000, 3), Amount(1_000_000_000, 4)]


def test_the_total_counts_time_in_which_two_requests_were_pulled_once():
    total = make_report(requests(), AMOUNTS, [[5, 6], [7, 8], [9, 9]]).total
    assert (total.prompt_tokens, total.bytes, total.descriptors, total.seconds) == (18, 6_000_000_000, 9, 3.0)
    assert total.gigabytes_per_second == 2.0


def test_one_different_token_shows_in_its_row_and_in_the_total():
    report = make_report(requests(), AMOUNTS, [[5, 6], [7, 0], [9, 9]])
    assert [row.tokens_equal for row in report.requests] == [True, False, True]
    assert not report.total.tokens_equal
    out = io.StringIO()
    Console(file=out, width=120).print(as_table(report))
    assert [line.count("DIFFERENT") for line in out.getvalue().splitlines() if "DIFFERENT" in line] == [1, 1]


def test_the_json_has_a_row_a_request_and_the_total():
    document = json.loads(as_json(make_report(requests(), AMOUNTS, [[5, 6], [7, 8], [9, 9]]), []))
    assert [row["request"] for row in document["requests"]] == ["a", "b", "c"]
    assert document["requests"][0]["gigabytes_per_second"] == 2.0
    assert document["total"]["tokens_equal"] is True
