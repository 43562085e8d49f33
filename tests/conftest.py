"""Holds for all tests: asserts of helper modules explain themselves, and what takes long is marked `slow`."""

from collections import Counter
from pathlib import Path

import pytest

pytest.register_assert_rewrite(*(f"tests.{folder.name}" for folder in Path(__file__).parent.iterdir()))


def pytest_collection_modifyitems(items):
    """Marks as `slow` what needs a machine of its own, and all but one in N variants of a test marked `sample(N)`."""
    seen = Counter()
    for item in items:
        sample = item.get_closest_marker("sample")
        test = item.nodeid.partition("[")[0]
        if sample is not None and seen[test] % sample.args[0]:
            item.add_marker(pytest.mark.slow)
        seen[test] += 1
        if item.get_closest_marker("deploy") or item.get_closest_marker("hosts"):
            item.add_marker(pytest.mark.slow)


@pytest.fixture
def fleet(tmp_path):
    """Starts real daemons and workers, and ends them with the test."""
    from tests.support.fleet import Fleet  # noqa: PLC0415 - after its asserts are registered

    with Fleet(tmp_path) as started:
        yield started


@pytest.fixture
def standin(tmp_path_factory):
    """A machine with a stand-in GPU. Processes that are started with its `environment` use it."""
    from tests.support.gpu import standin_machine  # noqa: PLC0415 - after its asserts are registered

    with standin_machine(tmp_path_factory.mktemp("standin")) as driver:
        yield driver
