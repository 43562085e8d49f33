"""Judges a command of a document without running it."""

import argparse
import importlib
import re
from pathlib import Path

from kvd.cli.main import COMMANDS
from kvd.daemon.config import Config, load
from tests.docs.pages import ROOT


def wrong(words: list[str], *, whole: bool) -> str | None:
    """Why this command of kvd, make or Python could not work; None if it could, or is another program's.

    Of a command in the running text, which may be shortened (`whole` is false), only names are checked.
    """
    program = words[0].rsplit("/", 1)[-1]
    if program == "kvd" and len(words) > 1:
        return _wrong_kvd(words[1:], whole=whole)
    if program == "make":
        return next((f"no target {word}" for word in words[1:] if _is_name(word) and word not in _targets()), None)
    if program.startswith("python") and words[1:2] == ["-m"] and len(words) > 2:
        return None if _module_exists(words[2]) else f"no module {words[2]}"
    if program.startswith("python") and len(words) > 1 and words[1].endswith(".py"):
        return None if (ROOT / words[1]).is_file() else f"no file {words[1]}"
    if program == "cp":
        return next((f"no file {word}" for word in words[1:] if word.startswith("deploy/") and not _file(word)), None)
    return None


def _wrong_kvd(words: list[str], *, whole: bool) -> str | None:
    if words[0] not in COMMANDS:
        return None if words[0].startswith("-") else f"kvd has no command {words[0]}"
    parser = argparse.ArgumentParser(prog="kvd")
    importlib.import_module(f"kvd.cli.{words[0]}").add_parser(parser.add_subparsers(dest="command"))
    if not whole:
        flags = [word.partition("=")[0] for word in words if word.startswith("--")]
        return next((f"kvd {words[0]} has no flag {flag}" for flag in flags if flag not in _flags(parser)), None)
    try:
        arguments = parser.parse_args(words)
    except SystemExit:
        return f"kvd {words[0]} does not take these arguments"
    if words[0] == "serve":
        load({name: value for name in Config.model_fields if (value := getattr(arguments, name)) is not None})
    return None


def _flags(parser: argparse.ArgumentParser) -> set[str]:
    """All flags of a parser and of the parsers below it."""
    found: set[str] = set()
    for action in parser._actions:
        found.update(action.option_strings)
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                found |= _flags(below)
    return found


def _targets() -> set[str]:
    return set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def _is_name(word: str) -> bool:
    return re.fullmatch(r"[a-z][\w-]*", word) is not None


def _module_exists(name: str) -> bool:
    if name.partition(".")[0] not in {"kvd", "tests", "benchmarks"}:
        return True
    path = ROOT / name.replace(".", "/")
    return path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()


def _file(word: str) -> bool:
    return Path(ROOT / word).exists()
