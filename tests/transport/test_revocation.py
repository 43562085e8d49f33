"""What metadata and keys protect on the transports available without an RDMA device."""

import json
import os
import subprocess
import sys

import pytest

from tests.support.patience import PATIENCE

pytest.importorskip("nixl_cu12", reason="nixl is not installed")

pytestmark = pytest.mark.real

BYTES, ZEROS = "DONE: [7]", "DONE: [0]"


@pytest.fixture(scope="module", params=["same_host", pytest.param("tcp", marks=pytest.mark.slow)])
def found(request: pytest.FixtureRequest) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name != "UCX_TLS"}
    if request.param == "tcp":
        environment["UCX_TLS"] = "tcp"
    run = subprocess.run(
        [sys.executable, "-m", "tests.transport.revocation_child"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return dict(json.loads(run.stdout))


def test_a_pool_that_was_given_is_read(found: dict[str, str]) -> None:
    assert found["given"] == BYTES


def test_nixl_reads_no_pool_that_was_not_in_the_metadata(found: dict[str, str]) -> None:
    assert found["withheld"] == "nixlNotFoundError"


def test_a_pool_whose_registration_has_ended_is_not_read_with_old_keys_any_more(found: dict[str, str]) -> None:
    assert found["deregistered"] == found["moved"] == found["registered anew"] == ZEROS


def test_who_gets_the_new_metadata_reads_it(found: dict[str, str]) -> None:
    assert found["given anew"] == BYTES
