"""Every command of every document runs as it stands there, or is checked as far as it can be."""

import tomllib

import pytest

from kvd.actors.gateway.admission import load as read_policy
from tests.docs.commands import wrong
from tests.docs.pages import ALL_BLOCKS, PAGES, ROOT, SHELL, Block, code_spans, stories
from tests.docs.shell import run

NEEDS = {"root", "network", "kubernetes", "gpu", "time", "files"}
SECONDS = 100.0

RUNNING = stories("runs")

NO_COMMANDS = {"kvd proof"}
"""Spans of code that begin like a command; this one personalises a hash."""


@pytest.mark.parametrize("block", ALL_BLOCKS, ids=lambda block: block.place)
def test_each_block_says_how_it_is_tested(block: Block) -> None:
    assert block.language, f"{block.place}: name the block's language: sh, console, python, toml or text"
    kinds = {"runs", "runs with vllm", "shows"} | {f"needs {what}" for what in NEEDS}
    assert block.kind in kinds, f"{block.place}: say in a comment how it is tested (tests/docs/pages.py)"
    assert block.detail, f"{block.place}: a name or a reason is missing in <!-- {block.kind}: ... -->"
    assert block.kind != "shows" or block.language not in SHELL, f"{block.place}: commands are not only shown"


@pytest.mark.real
@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("story", RUNNING)
def test_what_can_run_runs_as_it_stands_there(story: str, tmp_path) -> None:
    run(RUNNING[story], tmp_path, SECONDS)


@pytest.mark.parametrize("block", [block for block in ALL_BLOCKS if block.language in SHELL], ids=lambda one: one.place)
def test_the_commands_of_a_block_exist_and_take_their_arguments(block: Block) -> None:
    commands = block.commands()
    assert commands, f"{block.place}: no command"
    for words in commands:
        assert wrong(words, whole=True) is None, f"{block.place}: {' '.join(words)}: {wrong(words, whole=True)}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_in_the_running_text_name_what_exists(page) -> None:
    spans = [span.split() for span in code_spans(page) if span not in NO_COMMANDS]
    found = [(words, wrong(words, whole=False)) for words in spans if words]
    assert not [f"{page.name}: `{' '.join(words)}`: {why}" for words, why in found if why]


def test_the_worker_policy_of_the_documents_is_one(tmp_path) -> None:
    shown = [block for block in ALL_BLOCKS if block.language == "toml"]
    assert shown
    for block in shown:
        tomllib.loads(block.text)
        file = tmp_path / "policy.toml"
        file.write_text(block.text)
        assert read_policy(file), block.place


def test_a_wrong_command_is_found() -> None:
    assert wrong(["kvd", "bake"], whole=True)
    assert wrong(["kvd", "status", "--colour"], whole=False)
    assert wrong(["make", "cake"], whole=False)
    assert wrong(["python", "-m", "tests.cake"], whole=True)
    assert wrong(["kvd", "status", "--socket", "x.sock"], whole=True) is None
