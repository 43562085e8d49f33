import importlib.util
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.support.fleet import until
from tests.vllm.shared import Shared
from tests.vllm.testbed.catalog import MODELS, write_models
from tests.vllm.testbed.servers import SHARED_MEMORY

HERE = Path(__file__).parent
TEST_SECONDS = 900
"""The first test of a module starts three servers: two minutes where the machine has other work."""

LAST = [HERE / "test_lifecycle.py", HERE / "test_pauses.py", HERE / "test_faults.py"]
"""They share servers, which the last one kills."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ours = [item for item in items if item.path.parent == HERE]
    items.sort(key=lambda item: LAST.index(item.path) if item.path in LAST else -1)
    found = importlib.util.find_spec("vllm")
    installed = found is not None and found.origin is not None  # a folder named vllm could pass for a namespace package
    for item in ours:
        item.add_marker(pytest.mark.real)
        item.add_marker(pytest.mark.timeout(TEST_SECONDS))
        if not installed:
            item.add_marker(pytest.mark.skip(reason="needs vLLM: make test-vllm"))
    for item in items:
        if "daemons" in item.fixturenames and item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.real)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """After a test that failed, its report has what the servers logged of it, and the next one gets other servers."""
    report = yield
    if report.failed and "shared" in item.funcargs:
        report.sections += item.funcargs["shared"].logged()
        item.funcargs["shared"].stop()
    return report


@pytest.fixture(scope="session")
def shared(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    """The servers that tests share."""
    started = Shared(models, tmp_path_factory)
    try:
        yield started
    finally:
        started.stop()


@pytest.fixture(scope="session", autouse=True)
def _no_shared_memory_is_left() -> Iterator[None]:
    """Not even of servers that were killed: multiprocessing's tracker outlives them for a moment and removes it."""
    yield
    for _ in until("shared memory of vLLM servers is removed"):
        if not list(Path("/dev/shm").glob(f"{SHARED_MEMORY}*")):  # noqa: S108  # what is there is looked at, not used
            break


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with all models of the laboratory."""
    folder = tmp_path_factory.mktemp("models")
    write_models(folder, *MODELS)
    return folder
