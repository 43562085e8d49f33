import importlib.util
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.sglang.shared import Shared
from tests.vllm.testbed.catalog import write_models

HERE = Path(__file__).parent
TEST_SECONDS = 900
"""The first test of a module starts three servers: two minutes where the machine has other work."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    found = importlib.util.find_spec("sglang")
    installed = (
        found is not None and found.origin is not None
    )  # a folder named sglang could pass for a namespace package
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.real)
            item.add_marker(pytest.mark.timeout(TEST_SECONDS))
            if not installed:
                item.add_marker(pytest.mark.skip(reason="needs SGLang: make test-sglang"))


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the models of the laboratory that SGLang runs on a CPU."""
    folder = tmp_path_factory.mktemp("models")
    write_models(folder, "llama")
    return folder


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
