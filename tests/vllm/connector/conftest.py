import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.forkserver import ForkedProcesses
from tests.support.patience import PATIENCE

with warnings.catch_warnings(), contextlib.suppress(ModuleNotFoundError):
    warnings.simplefilter("ignore")  # of vLLM and torch about themselves
    import tests.vllm.connector.connector_engine  # noqa: F401


@pytest.fixture
def daemons(tmp_path: Path) -> Iterator[Any]:
    """Daemons on a folder of their own, ended with the test."""
    from tests.vllm.connector.connector_engine import Daemons  # noqa: PLC0415 - needs vLLM

    with ForkedProcesses(tmp_path) as processes:
        yield Daemons(processes, tmp_path)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Orders wait for a daemon that was started anew as long as a busy machine takes for that."""
    monkeypatch.setattr("kvd.engines.vllm.worker.PATIENCE_SECONDS", PATIENCE)


@pytest.fixture(scope="session")
def configurations(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """vLLM's configuration by kind of model; made once, because that takes seconds."""
    from tests.vllm.connector.connector_engine import configuration  # noqa: PLC0415 - needs vLLM

    made: dict[str, Any] = {}

    def of(kind: str) -> Any:
        if kind not in made:
            made[kind] = configuration(kind, tmp_path_factory.mktemp("models") / kind)
        return made[kind]

    return of
