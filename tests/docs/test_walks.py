"""The walks of docs/walks.md: every function is there, and calls the next one unless a hand-over is between them.

And the places of docs/adding.md are there.
"""

import ast
import re
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "walks.md"
PLACES = re.findall(r"`([\w/]+\.\w+)(?::([\w.]+))?`", (ROOT / "docs" / "adding.md").read_text())
STEP = re.compile(r"^\d+\. (\*\*(?:socket|mailbox|thread)\*\* )?`(kvd/[\w/]+\.py):([\w.]+)`", re.MULTILINE)


class Step(NamedTuple):
    handed_over: bool
    path: str
    name: str

    def __str__(self) -> str:
        return f"{self.path}:{self.name}"


def walks() -> dict[str, list[Step]]:
    parts = re.split(r"^## (.*)$", PAGE.read_text(), flags=re.MULTILINE)[1:]
    return {
        title: [Step(bool(handed), path, name) for handed, path, name in STEP.findall(text)]
        for title, text in zip(parts[::2], parts[1::2], strict=True)
    }


WALKS = walks()


@cache
def definition(path: str, name: str) -> ast.stmt:
    """The definition of a function, a class, a method of a class, or a constant."""
    body: list[ast.stmt] = ast.parse((ROOT / path).read_text()).body
    for part in name.split("."):
        found = [node for node in body if part in (getattr(node, "name", None), *assigned(node))]
        assert found, f"{path} has no {name}"
        node = found[-1]
        body = getattr(node, "body", [])
    return node


def assigned(node: ast.stmt) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def function(path: str, name: str) -> ast.AST:
    node = definition(path, name)
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef), f"{path}:{name} is no function"
    return node


def names_in(node: ast.AST) -> set[str]:
    """What a function calls, or passes on to be called."""
    attributes = {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}
    return attributes | {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def test_there_are_three_and_every_numbered_line_is_a_step() -> None:
    assert len(WALKS) == 3
    assert sum(map(len, WALKS.values())) == len(re.findall(r"^\d+\. ", PAGE.read_text(), re.MULTILINE))


@pytest.mark.parametrize("title", WALKS)
def test_every_function_of_a_walk_is_there(title: str) -> None:
    for step in WALKS[title]:
        function(step.path, step.name)


@pytest.mark.parametrize("title", WALKS)
def test_every_function_of_a_walk_calls_the_next_one(title: str) -> None:
    for step, following in pairwise(WALKS[title]):
        called = following.name.rpartition(".")[2]
        if not following.handed_over:
            assert called in names_in(function(step.path, step.name)), f"{step} does not call {following}"


def test_every_place_where_something_is_added_is_there() -> None:
    assert len(PLACES) > 30
    for path, name in PLACES:
        assert (ROOT / path).exists(), path
        if name:
            definition(path, name)


def test_a_hand_over_is_not_claimed_where_there_is_a_call() -> None:
    for steps in WALKS.values():
        for step, following in pairwise(steps):
            called = following.name.rpartition(".")[2]
            if following.handed_over and step.path == following.path:
                assert called not in names_in(function(step.path, step.name)), f"{step} calls {following}"
