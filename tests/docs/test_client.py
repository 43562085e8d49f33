"""The page about the client has every public name with its arguments as they are."""

import dataclasses
import inspect
from typing import Any

import pytest

import kvd.client
from kvd.client import AsyncWorker, Blocks, Worker
from tests.docs.pages import ROOT

PAGE = (ROOT / "docs/client.md").read_text()
PUBLIC = sorted(name for name in dir(Worker) if not name.startswith("_"))
RECORDS = [kind for kind in vars(kvd.client).values() if isinstance(kind, type) and dataclasses.is_dataclass(kind)]


def signature(owner: type[Any], name: str) -> str | None:
    """`name(arguments)` with defaults and without types; None of a property."""
    if isinstance(inspect.getattr_static(owner, name), property):
        return None
    shown = []
    for parameter in inspect.signature(getattr(owner, name)).parameters.values():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and "*" not in shown:
            shown.append("*")
        default = "" if parameter.default is inspect.Parameter.empty else f"={parameter.default!r}"
        if parameter.name != "self":
            shown.append(parameter.name + default)
    return f"{name}({', '.join(shown)})"


@pytest.mark.parametrize("name", kvd.client.__all__)
def test_each_exported_name_is_on_the_page(name: str) -> None:
    assert f"`{name}`" in PAGE or f"`{name}(" in PAGE


@pytest.mark.parametrize("name", PUBLIC)
def test_each_method_and_property_of_a_worker_is_on_the_page_as_it_is(name: str) -> None:
    assert f"`{signature(Worker, name) or name}`" in PAGE


def test_both_workers_have_the_same_methods_with_the_same_arguments() -> None:
    assert sorted(name for name in dir(AsyncWorker) if not name.startswith("_")) == PUBLIC
    assert [signature(AsyncWorker, name) for name in PUBLIC] == [signature(Worker, name) for name in PUBLIC]


@pytest.mark.parametrize("name", PUBLIC)
def test_the_page_says_which_methods_wait(name: str) -> None:
    row = next((line for line in PAGE.splitlines() if line.startswith(f"| `{name}(")), "")
    assert (" waits |" in row) == inspect.iscoroutinefunction(getattr(AsyncWorker, name))


@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.__name__)
def test_each_event_and_blocks_is_on_the_page_with_its_fields(kind: type[Any]) -> None:
    fields = ", ".join(field.name for field in dataclasses.fields(kind))
    assert f"`{kind.__name__}({fields})`" in PAGE


def test_blocks_and_all_eleven_events_are_records() -> None:
    assert Blocks in RECORDS
    assert len(RECORDS) == len(kvd.client.__all__) - len(("Worker", "AsyncWorker", "Event"))
