"""The page about numbers names fields that the protocol has."""

import re

import pytest

from kvd.protocol import export, peer, ticket, worker
from kvd.protocol.types import Message
from tests.docs.pages import ROOT

FIELD = re.compile(r"`([A-Z]\w+)\.(\w+)`")
PAGE = (ROOT / "docs/numbers.md").read_text()
NAMED = sorted(set(FIELD.findall(PAGE)) - {("Message", "field")})


def message(name: str) -> type[Message] | None:
    found = [getattr(module, name) for module in (worker, peer, ticket, export) if hasattr(module, name)]
    return found[0] if found else None


@pytest.mark.parametrize(("name", "field"), NAMED, ids=lambda part: part)
def test_each_field_that_the_page_names_is_one_of_that_message(name: str, field: str) -> None:
    kind = message(name)
    assert kind is not None, f"the protocol has no message {name}"
    assert field in kind.__struct_fields__


@pytest.mark.parametrize("number", ["incarnation", "generation", "epoch", "claim", "call", "sequence", "instance"])
def test_each_message_that_has_such_a_number_is_named(number: str) -> None:
    kinds = {
        kind
        for module in (worker, peer, ticket)
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, Message) and number in kind.__struct_fields__
    }
    assert kinds
    assert not [kind.__name__ for kind in kinds if (kind.__name__, number) not in NAMED]
