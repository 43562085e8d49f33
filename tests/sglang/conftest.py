from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.serving.shared import mark_real, report_and_replace, stopped_in_the_end
from tests.sglang.shared import OTHERS, Shared
from tests.vllm.testbed.catalog import write_models

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            mark_real(item, "sglang", "make test-sglang")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the models of the laboratory that SGLang runs on a CPU."""
    folder = tmp_path_factory.mktemp("models")
    write_models(folder, "llama", *OTHERS)
    return folder


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    return report_and_replace(item, (yield))


@pytest.fixture(scope="session")
def shared(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    """The servers that tests share."""
    with stopped_in_the_end(Shared(models, tmp_path_factory)) as started:
        yield started
