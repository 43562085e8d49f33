"""What vLLM calls in each of its processes, wherever kvd is installed."""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from kvd.engines.vllm import plugin
from kvd.engines.vllm.plugin import register

PACKAGE = "vllm.distributed.kv_transfer.kv_connector"


def vllm_with(monkeypatch: pytest.MonkeyPatch, **factory: Any) -> None:
    """A stand-in for the package, whose registry has this and nothing else."""
    parts = PACKAGE.split(".")
    names = [".".join(parts[: length + 1]) for length in range(len(parts))] + [f"{PACKAGE}.factory"]
    for name in names:
        module = ModuleType(name)
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules[f"{PACKAGE}.factory"].KVConnectorFactory = type("KVConnectorFactory", (), factory)


def test_the_connector_is_known_by_its_name_once(monkeypatch: pytest.MonkeyPatch) -> None:
    known: dict[str, tuple[str, str]] = {}

    def add(name: str, module: str, connector: str) -> None:
        assert name not in known, "vLLM raises for a second one"
        known[name] = module, connector

    vllm_with(monkeypatch, _registry=known, register_connector=staticmethod(add))
    register()
    register()
    assert known == {"KvdConnector": ("kvd.engines.vllm", "KvdConnector")}


def no_such_module(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm_with(monkeypatch)
    monkeypatch.setitem(sys.modules, f"{PACKAGE}.factory", None)


def another_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm_with(monkeypatch, _connectors={})


def another_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    def add(name: str, module: str, connector: str, *, api: int) -> None: ...

    vllm_with(monkeypatch, _registry={}, register_connector=staticmethod(add))


@pytest.mark.parametrize("vllm", [no_such_module, another_registry, another_signature])
def test_a_vllm_whose_registry_is_another_one_starts_without_kvd(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, vllm: Callable[[pytest.MonkeyPatch], None]
) -> None:
    """It calls its plugins without a guard, also where kvd is installed and not used."""
    vllm(monkeypatch)
    register()
    (record,) = caplog.records
    assert (record.name, record.levelname) == (plugin.__name__, "WARNING")
    assert "KvdConnector is not registered" in record.getMessage()
