import subprocess
import sys

import pytest

from tests.support.patience import PATIENCE


@pytest.mark.real
def test_a_worker_pulls_in_nothing_that_belongs_to_the_daemon() -> None:
    program = "import kvd.client, sys; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    command = [sys.executable, "-c", program]
    loaded = subprocess.run(command, check=True, capture_output=True, text=True, timeout=PATIENCE)
    heavy = {
        "torch",
        "cuda",
        "nixl",
        "nixl_cu12",
        "nixl_cu13",
        "numpy",
        "pydantic",
        "structlog",
        "uvloop",
        "prometheus_client",
    }
    assert heavy & set(loaded.stdout.split()) == set()
