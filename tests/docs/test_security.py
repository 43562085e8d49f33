"""Each line of the page about security names tests that there are; each class of attacker is told of."""

import importlib.util
import re
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

PAGE = (ROOT / "docs/security.md").read_text()
TABLES = re.findall(r"^\| attack \| what stops it \| test \|\n\|[-|]+\|\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
ROWS = [tuple(cell.strip() for cell in row.strip("|").split(" | ")) for table in TABLES for row in table.splitlines()]
CLASSES = (
    "Another local user",
    "An admitted worker",
    "An admitted peer",
    "A stranger on the network",
    "A client of the router",
)


def has_tests(path: Path) -> bool:
    """Whether a file, or one in a folder, has a test."""
    files = [path] if path.is_file() else sorted(path.glob("**/test_*.py"))
    return any(re.search(r"^(async )?def test_\w+", file.read_text(), re.MULTILINE) for file in files)


def test_there_are_rows_and_each_has_an_attack_a_defence_and_a_test() -> None:
    assert len(TABLES) == 7
    assert len(ROWS) > 80
    assert [row for row in ROWS if len(row) != 3 or not all(row)] == []


@pytest.mark.parametrize(
    ("before", "row"), list(zip([ROWS[0], *ROWS[:-1]], ROWS, strict=True)), ids=lambda row: row[0][:40]
)
def test_the_tests_that_a_line_names_are_there(before: tuple[str, ...], row: tuple[str, ...]) -> None:
    cell = before[2] if row[2] == "the same" else row[2]
    named = re.findall(r"`([^`]+)`", cell)
    assert named, f"{row[0]}: no test"
    for name in named:
        if command := re.match(r"python -m ([\w.]+)", name):
            assert importlib.util.find_spec(command[1]), f"{row[0]}: {name}"
        else:
            assert has_tests(ROOT / name), f"{row[0]}: {name} has no test"


@pytest.mark.parametrize("who", CLASSES)
def test_the_page_says_what_each_kind_of_attacker_can_still_do(who: str) -> None:
    section = PAGE.split("## What each can still do\n")[1].split("\n## ")[0]
    [text] = [part for part in section.split("\n**")[1:] if part.startswith(who)]
    assert text.count("\n- ") >= 3
