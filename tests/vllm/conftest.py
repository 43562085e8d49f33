import importlib.util
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vllm.testbed.catalog import write_models

HERE = Path(__file__).parent
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  # what is there is looked at, not used
TEST_SECONDS = 900
"""The first test of a module starts three servers: two minutes where the machine has other work."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ours = [item for item in items if item.path.parent == HERE]
    found = importlib.util.find_spec("vllm")
    installed = found is not None and found.origin is not None  # a folder named vllm could pass for a namespace package
    for item in ours:
        item.add_marker(pytest.mark.real)
        item.add_marker(pytest.mark.timeout(TEST_SECONDS))
        if not installed:
            item.add_marker(pytest.mark.skip(reason="needs vLLM: make test-vllm"))


@pytest.fixture(scope="session", autouse=True)
def _no_shared_memory_is_left() -> Iterator[None]:
    """Not even of servers that were killed: multiprocessing's tracker outlives them for a moment and removes it."""
    before = set(SHARED_MEMORY.glob("psm_*"))
    yield
    deadline = time.monotonic() + 10
    while left := set(SHARED_MEMORY.glob("psm_*")) - before:
        assert time.monotonic() < deadline, f"shared memory of vLLM servers is left: {left}"
        time.sleep(0.1)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with all models of the laboratory."""
    folder = tmp_path_factory.mktemp("models")
    write_models(folder, "llama", "gemma", "deepseek", "bench", "eagle")
    return folder
