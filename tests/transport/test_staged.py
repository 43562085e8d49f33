import pytest

from tests.conformance.contract import CHECKS, Contract
from tests.transport.staged_site import StagedSite

PAIRS = [
    pytest.param(True, True, id="gpu-to-gpu"),
    pytest.param(True, False, id="gpu-to-host"),
    pytest.param(False, True, id="host-to-gpu"),
    pytest.param(False, False, id="host-to-host"),
]


@pytest.mark.parametrize(("source", "target"), PAIRS)
@pytest.mark.parametrize("check", CHECKS)
async def test_staged_reads_keep_the_contract(check, source, target):
    await Contract(StagedSite(source=source, target=target)).run(check)
