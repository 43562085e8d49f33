"""docs/vllm.md's table of capabilities: whatever kvd is said to do is shown by tests that are there."""

import re
from dataclasses import dataclass

import pytest

from tests.docs.pages import ROOT

_ROW = re.compile(r"^\| (?P<name>.+?) \| (?P<other>.+?) \| (?P<kvd>.+?) \|(?P<shown>.*)\|$", re.MULTILINE)
_SHOWN = re.compile(r"`(?P<path>[\w/]+\.py)`(?: \(`(?P<variant>[\w-]+)`\))?")


@dataclass(frozen=True)
class Capability:
    """A row; `tests` are the files that show it, each with the variant of its tests that does."""

    name: str
    kvd: str
    tests: tuple[tuple[str, str], ...]


def capabilities() -> list[Capability]:
    table = (ROOT / "docs/vllm.md").read_text().partition("| shown by |\n|---|---|---|---|\n")[2].partition("\n\n")[0]
    rows = [match.groupdict() for match in _ROW.finditer(table)]
    assert len(rows) == len(table.splitlines()) > 30
    return [
        Capability(
            row["name"], row["kvd"], tuple((m["path"], m["variant"] or "") for m in _SHOWN.finditer(row["shown"]))
        )
        for row in rows
    ]


ROWS = capabilities()


@pytest.mark.parametrize("row", [row for row in ROWS if row.tests], ids=lambda row: row.name)
def test_what_shows_a_capability_is_there(row: Capability) -> None:
    for path, variant in row.tests:
        file = ROOT / "tests" / path
        assert file.name.startswith("test_"), path
        text = file.read_text()
        assert re.search(r"^(async )?def test_", text, re.MULTILINE), path
        assert not variant or f'"{variant}"' in text, (path, variant)


def test_a_yes_names_what_shows_it() -> None:
    assert [row.name for row in ROWS if row.kvd.startswith("yes") and not row.tests] == []
