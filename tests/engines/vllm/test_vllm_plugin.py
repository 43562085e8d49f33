"""What vLLM calls in each of its processes, wherever kvd is installed."""

import logging
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest

from kvd.engines import redaction
from kvd.engines.vllm import plugin
from kvd.engines.vllm.plugin import register

PACKAGE = "vllm.distributed.kv_transfer.kv_connector"


@pytest.fixture(autouse=True)
def _own_logging(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is installed for good in a process of vLLM ends with the test."""
    monkeypatch.setattr(redaction, "_installed", False)
    factory = logging.getLogRecordFactory()
    yield
    logging.setLogRecordFactory(factory)


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


def dynamo_with(monkeypatch: pytest.MonkeyPatch, **protocols: Any) -> None:
    """A stand-in for Dynamo's package, as of 1.6."""
    for name in ("dynamo", "dynamo.vllm", "dynamo.vllm.kv_connector_protocols"):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
    vars(sys.modules["dynamo.vllm.kv_connector_protocols"]).update(protocols)


def test_dynamo_asks_for_kvds_parameters_as_for_those_of_nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"NixlConnector": object()}
    dynamo_with(monkeypatch, KV_CONNECTOR_PROTOCOLS=known)
    vllm_with(monkeypatch, _registry={"KvdConnector": None})
    register()
    register()
    assert known["KvdConnector"] is known["NixlConnector"]


def test_another_dynamo_is_left_alone_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    dynamo_with(monkeypatch)
    vllm_with(monkeypatch, _registry={"KvdConnector": None})
    register()
    (record,) = caplog.records
    assert "not known to this Dynamo" in record.getMessage()


def test_records_that_an_application_makes_by_itself_have_no_name_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm_with(monkeypatch, _registry={"KvdConnector": None})
    register()
    record = logging.makeLogRecord({"name": "app", "msg": "hello"})
    assert (record.name, record.getMessage()) == ("app", "hello")


TICKET = "kvd1.k5Sq-_8A"
OFFER = "kvdo1.b7TzXw-_"
TURN = "kvdt1.0123abcd"


@pytest.mark.parametrize(
    ("message", "arguments", "logged"),
    [
        ("params: %s", ({"kvd_ticket": TICKET, "x": 1},), "params: {'kvd_ticket': 'kvd1.(not shown)', 'x': 1}"),
        (f"cut short: {TICKET[:7]}", (), "cut short: kvd1.(not shown)"),
        (f"two: {TICKET}, {TICKET}", (), "two: kvd1.(not shown), kvd1.(not shown)"),
        ("params: %s", ({"kvd_offer": OFFER},), "params: {'kvd_offer': 'kvd1.(not shown)'}"),
        ("params: %s", ({"kvd_turn": TURN},), "params: {'kvd_turn': 'kvd1.(not shown)'}"),
        ("%d", ("no number",), None),
        ("100 %% of %s", ("nothing",), "100 % of nothing"),
    ],
)
def test_tickets_do_not_reach_vllms_log(
    monkeypatch: pytest.MonkeyPatch, message: str, arguments: tuple[Any, ...], logged: str | None
) -> None:
    vllm_with(monkeypatch, _registry={"KvdConnector": None})
    register()
    make = logging.getLogRecordFactory()
    record = make("vllm.entrypoints.logger", logging.INFO, "logger.py", 1, message, arguments, None)
    if logged is None:  # what logging cannot format either is left to it
        assert (record.msg, record.args) == (message, arguments)
    else:
        assert record.getMessage() == logged
    error = ValueError(f"params: {TICKET}")
    raised = logging.Formatter().format(
        make("vllm.x", logging.ERROR, "x.py", 1, "failed", (), (ValueError, error, None))
    )
    assert raised == "failed\nValueError: params: kvd1.(not shown)"
    other = make("app", logging.INFO, "app.py", 1, TICKET, (), None)
    assert other.getMessage() == TICKET, "other people's messages are not looked into"
