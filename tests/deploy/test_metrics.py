"""What is scraped: names that dashboards and alerts of others depend on, held equal to a golden file."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvd.metrics import Metrics

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "golden/metrics.txt"
PROMETHEUS = ROOT / "deploy/prometheus"
FROM_OUTSIDE = {"up"} | {f"process_{name}" for name in ("resident_memory_bytes", "open_fds", "cpu_seconds_total")}

VLLM = {
    "nixl_xfer_time_seconds": "kvd_read_duration_seconds",
    "nixl_post_time_seconds": "kvd_probe_seconds",
    "nixl_bytes_transferred": "kvd_read_bytes_total",
    "nixl_num_descriptors": "kvd_read_descriptors_total",
    "nixl_num_failed_transfers": "kvd_reads_failed_total",
    "nixl_num_failed_notifications": "kvd_fences_total",
    "nixl_num_kv_expired_reqs": "kvd_offers_total",
}


def scrape() -> str:
    """A scrape with one sample of every metric, labels set to their own names."""
    metrics = Metrics(CollectorRegistry())
    for instrument in vars(metrics).values():
        if isinstance(instrument, Counter | Gauge | Histogram) and instrument._labelnames:
            instrument.labels(*(f"<{name}>" for name in instrument._labelnames))
    lines = generate_latest(metrics.registry).decode().splitlines(keepends=True)
    # `_created` series are the library's, and a version is no part of the interface.
    text = "".join(line for line in lines if "_created" not in line)
    return re.sub(r'version="[^"]*"', 'version="<version>"', text)


def names() -> set[str]:
    return set(re.findall(r"^(\w+)", "\n".join(line for line in scrape().splitlines() if line[0] != "#"), re.MULTILINE))


def promtool(*arguments: str, text: str | None = None) -> str:
    if shutil.which("promtool") is None:
        pytest.skip("needs promtool: apt-get install prometheus")
    command = ["promtool", *arguments]
    ran = subprocess.run(command, input=text, capture_output=True, text=True, timeout=100, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout + ran.stderr


def test_a_scrape_is_the_golden_one() -> None:
    assert scrape() == GOLDEN.read_text(), f"if this change is meant, write the new scrape to {GOLDEN}"


def test_names_and_units_follow_the_practice_of_prometheus() -> None:
    assert promtool("check", "metrics", text=scrape()) == ""


def test_no_label_can_take_any_value_that_a_request_brings() -> None:
    labels = set(re.findall(r'(\w+)="', scrape())) - {"le", "version"}
    bounded = {"outcome", "code", "reason", "answer", "state", "kind", "backing", "socket", "actor", "part", "metric"}
    assert labels == bounded | {"thread"}


def test_what_the_in_process_connector_exports_has_a_counterpart() -> None:
    exported = {re.sub(r"_(bucket|sum|count)$", "", name) for name in names()}
    assert set(VLLM.values()) <= exported


def test_alert_rules_are_valid_and_fire_exactly_where_their_tests_say() -> None:
    promtool("check", "rules", str(PROMETHEUS / "kvd.rules.yml"))
    promtool("check", "config", str(PROMETHEUS / "prometheus.yml"))
    promtool("test", "rules", str(PROMETHEUS / "kvd.rules.test.yml"))


@pytest.mark.parametrize("file", ["prometheus/kvd.rules.yml", "grafana/kvd.json"])
def test_rules_and_dashboard_name_only_metrics_that_exist(file: str) -> None:
    text = (ROOT / "deploy" / file).read_text()
    expressions = re.sub(r"annotations:(\n {10}.*)+", "", text)
    used = set(re.findall(r"\b((?:kvd|process)_\w+)\b", expressions))
    assert used <= names() | FROM_OUTSIDE, used - names()


def test_every_alert_has_its_section_in_the_runbook() -> None:
    alerts = re.findall(r"- alert: (\w+)", (PROMETHEUS / "kvd.rules.yml").read_text())
    headings = re.findall(r"^#+ (\w+)$", (ROOT / "docs/operations.md").read_text(), re.MULTILINE)
    assert 8 <= len(alerts) <= 10
    assert set(alerts) <= set(headings)


def test_panels_of_the_dashboard_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads((ROOT / "deploy/grafana/kvd.json").read_text())["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells
