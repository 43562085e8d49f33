import json
import os
import subprocess
import sys

import pytest

from tests.conformance.contract import CHECKS

pytest.importorskip("nixl_cu12", reason="nixl is not installed")

pytestmark = pytest.mark.real

ALL_CHECKS_SECONDS = 280
"""The first test of each way waits for all its checks: 10 s on an idle machine."""

OWN_CHECKS = (
    "a_process_that_ends_by_a_defect_says_so_and_is_started_again",
    "metadata_that_would_end_the_process_fails_its_peer_and_nothing_else",
)
WAYS = [
    pytest.param({"UCX_TLS": "tcp"}, id="tcp"),
    pytest.param({}, id="same_host", marks=pytest.mark.slow),  # two pods of one host that share no folder
]
"""Environments."""


@pytest.fixture(scope="module", params=WAYS)
def results(request: pytest.FixtureRequest) -> dict[str, str | None]:
    """The error of each check, None if it passed; a check that is missing never ended."""
    environment = {name: value for name, value in os.environ.items() if name != "UCX_TLS"} | request.param
    run = subprocess.run(
        [sys.executable, "-m", "tests.transport.nixl_child", *CHECKS, *OWN_CHECKS],
        env=environment,
        capture_output=True,
        text=True,
        timeout=ALL_CHECKS_SECONDS,
        check=False,
    )
    found = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    return {result["check"]: result["error"] for result in found} | {"": run.stderr[-4000:] if run.returncode else None}


@pytest.mark.parametrize("check", [*CHECKS, *OWN_CHECKS])
def test_nixl_keeps_the_contract(results: dict[str, str | None], check: str) -> None:
    assert results.get(check, f"it never ended: {results['']}") is None, results[check]


def test_a_process_that_stopped_its_transports_and_lost_a_peer_exits_cleanly(results: dict[str, str | None]) -> None:
    assert results[""] is None
