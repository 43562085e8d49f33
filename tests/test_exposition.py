"""Metrics as text, asked for oddly and often."""

import time
from collections.abc import Iterable

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import GaugeMetricFamily, Metric

from kvd import limits
from kvd.errors import BadRequest
from kvd.exposition import Exposition


class Counted:
    """A collector that says how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0

    def collect(self) -> Iterable[Metric]:
        self.asked += 1
        yield GaugeMetricFamily("asked", "How often.", value=self.asked)


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("", "text/plain; version=0.0.4"),
        ("\xff\xfe;;;=,,", "text/plain; version=0.0.4"),
        ("application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6", "application/openmetrics-text"),
    ],
)
def test_a_client_gets_the_format_that_it_accepts(accept: str, kind: str) -> None:
    body, content_type = Exposition(CollectorRegistry()).answer(accept)
    assert content_type.startswith(kind)
    assert body.endswith(b"# EOF\n") is content_type.startswith("application")


def test_versions_that_clients_make_up_bring_no_further_text() -> None:
    registry, counted = CollectorRegistry(), Counted()
    registry.register(counted)
    counted.asked = 0
    exposition = Exposition(registry)
    began = time.monotonic()
    kinds = {
        exposition.answer(f"application/openmetrics-text;version=1.{number}.0;escaping=dots")[1]
        for number in range(50 * limits.METRICS_PER_SECOND)
    }
    assert kinds == {"application/openmetrics-text; version=1.0.0; charset=utf-8; escaping=dots"}
    assert counted.asked <= limits.METRICS_PER_SECOND * (2 + time.monotonic() - began)


@pytest.mark.parametrize(
    "accept", ["application/openmetrics-text;version=abc", "text/plain;version=zz;escaping=values"]
)
def test_a_version_that_is_no_number_is_refused(accept: str) -> None:
    with pytest.raises(BadRequest, match=f"'{accept}'"):
        Exposition(CollectorRegistry()).answer(accept)


def test_text_is_new_each_time_until_it_is_asked_for_too_often() -> None:
    registry, counted = CollectorRegistry(), Counted()
    registry.register(counted)
    counted.asked = 0
    exposition = Exposition(registry)
    began = time.monotonic()
    for number in range(1, limits.METRICS_PER_SECOND + 1):
        assert f"asked {number}.0".encode() in exposition.answer("")[0]
    for _ in range(50 * limits.METRICS_PER_SECOND):
        assert b"asked " in exposition.answer("")[0]
    assert counted.asked <= limits.METRICS_PER_SECOND * (2 + time.monotonic() - began)
