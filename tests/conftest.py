"""Holds for all tests: asserts of helper modules explain themselves, and marks say which command runs a test."""

import gc
import os
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

pytest.register_assert_rewrite(*(f"tests.{folder.name}" for folder in Path(__file__).parent.iterdir()))

from tests.support.forkserver import forked  # noqa: E402 - after their asserts are registered
from tests.support.gpu import MEMORIES, machine_with, standin_machine  # noqa: E402
from tests.vllm.testbed.service import Service  # noqa: E402

Service.start_child = staticmethod(forked)

settings.register_profile("same", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("random", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=1_000)
settings.load_profile("same")
"""The same examples on every machine, however slow it is; `--hypothesis-profile=random` looks for new ones."""

STARTS_PROCESSES = {"fleet", "standin", "devices"}
"""Fixtures that do."""
REAL_SECONDS = 300
"""The time limit of a test that starts processes, unless it has one of its own."""


def pytest_collection_modifyitems(config, items):
    """Marks as `slow` what needs a machine of its own, and all but a sample of the variants of a test marked so.

    `sample(N)` is one variant in N by their names, in whatever order they run; `sample(of=...)` are those for whose
    parameters the function says so.

    What starts processes gets the time that a busy machine takes, and may run again where reruns are asked for
    (`--max-suite-reruns`); what does not gives the same answer each time.
    """
    seen = Counter()
    for item in sorted(items, key=lambda item: item.nodeid):
        sample = item.get_closest_marker("sample")
        test = item.nodeid.partition("[")[0]
        if sample is not None and not _in_sample(item, seen[test], *sample.args, **sample.kwargs):
            item.add_marker(pytest.mark.slow)
        seen[test] += 1
        if any(item.get_closest_marker(name) for name in ("deploy", "hosts")):
            item.add_marker(pytest.mark.real)
        if any(item.get_closest_marker(name) for name in ("deploy", "hosts", "alone")):
            item.add_marker(pytest.mark.slow)
        if STARTS_PROCESSES & set(item.fixturenames):
            item.add_marker(pytest.mark.real)
        if item.get_closest_marker("real"):
            if not item.get_closest_marker("timeout"):
                item.add_marker(pytest.mark.timeout(REAL_SECONDS))
            if config.getoption("max_suite_reruns"):
                item.add_marker(pytest.mark.flaky(reruns=1, reruns_delay=5))


def _in_sample(item, number, one_in=1, of=None):
    return number % one_in == 0 if of is None else of(**item.callspec.params)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """With KVD_TEST_NO_SKIPS=1 a `deploy` test that is skipped fails: there, what it needs was to be installed."""
    report = yield
    if report.skipped and item.get_closest_marker("deploy") and os.environ.get("KVD_TEST_NO_SKIPS") == "1":
        report.outcome, report.longrepr = "failed", f"skipped, with KVD_TEST_NO_SKIPS=1: {report.longrepr[-1]}"
    return report


def pytest_collection_finish(session):
    """Collections after each test look at what the test has left, not at all that was imported and collected."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def fleet(tmp_path):
    """Starts real daemons and workers, and ends them with the test."""
    from tests.support.fleet import Fleet  # noqa: PLC0415 - after its asserts are registered

    with Fleet(tmp_path) as started:
        yield started


@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.slow] * ("gpu" in name)) for name in MEMORIES])
def devices(request, tmp_path_factory):
    """Those of a producer's pools and of a consumer's, which others take to be on another host."""
    with machine_with(MEMORIES[request.param], tmp_path_factory.mktemp("standin")):
        yield MEMORIES[request.param]


@pytest.fixture
def standin(tmp_path_factory):
    """A machine with a stand-in GPU. Processes that are started with its `environment` use it."""
    with standin_machine(tmp_path_factory.mktemp("standin")) as driver:
        yield driver
