import pytest

from tests.e2e.fleet import Fleet


@pytest.fixture
def fleet(tmp_path):
    with Fleet(tmp_path) as started:
        yield started
