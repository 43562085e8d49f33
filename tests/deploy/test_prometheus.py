"""A real Prometheus scrapes a running pair of daemons."""

import json
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fleet import Daemon, Fleet, until
from tests.support.patience import PATIENCE
from tests.support.ports import free_port

pytestmark = pytest.mark.deploy
RULES = Path(__file__).parents[2] / "deploy/prometheus/kvd.rules.yml"
BLOCKS = [1, 2, 3]


class Prometheus:
    """Scrapes `daemons` every half second, with the alert rules of this repository."""

    def __init__(self, folder: Path, daemons: list[Daemon]) -> None:
        targets = ", ".join(f'"{daemon.serving()["http"]}"' for daemon in daemons)
        (folder / "prometheus.yml").write_text(
            "global: {scrape_interval: 500ms, evaluation_interval: 500ms}\n"
            f"rule_files: [{RULES}]\n"
            f"scrape_configs: [{{job_name: kvd, static_configs: [{{targets: [{targets}]}}]}}]\n"
        )
        self.address = f"127.0.0.1:{free_port()}"
        self._process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={self.address}",
                "--log.level=error",
            ],
            stderr=subprocess.DEVNULL,
        )

    def get(self, path: str, **query: str) -> dict:
        address = f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        try:
            with urllib.request.urlopen(address, timeout=PATIENCE) as answer:
                return json.loads(answer.read())["data"]
        except OSError:
            return {}  # not up yet

    def value(self, expression: str) -> float | None:
        found = self.get("query", query=expression).get("result", [])
        return float(found[0]["value"][1]) if found else None

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(PATIENCE)


@pytest.fixture
def pair(fleet: Fleet) -> tuple[Daemon, Daemon]:
    return fleet.daemon("p"), fleet.daemon("d")


@pytest.fixture
def prometheus(tmp_path: Path, pair: tuple[Daemon, Daemon]) -> Iterator[Prometheus]:
    if shutil.which("prometheus") is None:
        pytest.skip("needs prometheus: apt-get install prometheus")
    started = Prometheus(tmp_path, list(pair))
    yield started
    started.close()


def test_prometheus_scrapes_a_pair_and_sees_a_pull_and_an_alert(
    fleet: Fleet, pair: tuple[Daemon, Daemon], prometheus: Prometheus
) -> None:
    source, target = pair
    prefill, decode = fleet.worker(source, "prefill"), fleet.worker(target, "decode")
    decode.call("pull", name="r", ticket=prefill.call("offer", name="o", ids=BLOCKS), ids=BLOCKS)
    assert decode.outcome("r")["kind"] == "Done"
    for _ in until("both daemons are scraped, and the pull with them"):
        if prometheus.value("sum(kvd_ready)") == 2 and prometheus.value('kvd_pulls_total{outcome="done"}') == 1:
            break
    assert prometheus.value("sum(up)") == 2
    assert prometheus.value("sum(kvd_read_bytes_total)") == len(BLOCKS) * 4096
    assert prometheus.value('sum(kvd_peer_paths{kind!="unknown"})') == 1
    (group,) = prometheus.get("rules")["groups"]
    assert {rule["health"] for rule in group["rules"]} <= {"ok", "unknown"}
    source.kill()
    for _ in until("the lost daemon is an alert"):
        alerts = {alert["labels"]["alertname"] for alert in prometheus.get("alerts").get("alerts", [])}
        if "KvdDown" in alerts:
            break
