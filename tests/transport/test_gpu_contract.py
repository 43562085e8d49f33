"""Copies within a GPU keep the contract: over the stand-in, and on a GPU (TESTS_ON_GPU=1)."""

import tempfile
from pathlib import Path

import pytest

from tests.support.gpu import over_standin

pytestmark = [pytest.mark.real, pytest.mark.slow]


@over_standin()
def test_copies_within_a_gpu_keep_the_contract() -> None:
    from tests.transport import gpu_child  # noqa: PLC0415 - its processes are to find the driver

    with tempfile.TemporaryDirectory(prefix="kvd-") as folder:
        gpu_child.main(Path(folder))
