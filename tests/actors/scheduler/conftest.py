import pytest

from tests.actors.stage import Stage


@pytest.fixture
def stage():
    stage = Stage(claim_ttl=3.0, retry=0.5)
    stage.attach()
    return stage
