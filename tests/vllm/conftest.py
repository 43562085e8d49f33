from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.serving.shared import mark_real, report_and_replace, stopped_in_the_end
from tests.support.fleet import until
from tests.vllm.shared import Shared
from tests.vllm.testbed.catalog import MODELS, write_models
from tests.vllm.testbed.servers import SHARED_MEMORY

HERE = Path(__file__).parent

LAST = [HERE / "test_lifecycle.py", HERE / "test_pauses.py", HERE / "test_faults.py"]
"""They share servers, which the last one kills."""
COMPARED = {HERE / f"test_{name}.py" for name in ("conversations", "growing", "router", "tokens")}
"""They share servers of the same models."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ours = [item for item in items if item.path.parent == HERE]
    items.sort(key=_turn)
    for item in ours:
        mark_real(item, "vllm", "make test-vllm")
    for item in items:
        if "daemons" in item.fixturenames and item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.real)


def _turn(item: pytest.Item) -> tuple[int, str]:
    """When a test runs, so that few servers are started anew: by its file, then by its model."""
    if item.path in LAST:
        return 2 + LAST.index(item.path), ""
    if item.path in COMPARED:
        return 1, str(item.callspec.params.get("model", "llama")) if hasattr(item, "callspec") else "llama"
    return 0, ""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    return report_and_replace(item, (yield))


@pytest.fixture(scope="session")
def shared(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    """The servers that tests share."""
    with stopped_in_the_end(Shared(models, tmp_path_factory)) as started:
        yield started


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
