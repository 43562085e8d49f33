"""Runs a function in a process of its own, which has the stand-in driver."""

import ast
import inspect
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

from tests.standin.driver import StandinDriver

_ROOT = Path(__file__).parents[2]


def program(child: Callable[..., None]) -> list[str]:
    """The command that calls `child` with the texts that follow. It knows what its file imports."""
    file = ast.parse(Path(inspect.getfile(child)).read_text())
    imports = [node for node in file.body if isinstance(node, ast.Import | ast.ImportFrom)]
    source = textwrap.dedent(inspect.getsource(child))
    return [
        sys.executable,
        "-c",
        "\n".join(["import sys", *map(ast.unparse, imports), source, f"{child.__name__}(*sys.argv[1:])"]),
    ]


def environment(driver: StandinDriver, **more: str) -> dict[str, str]:
    return {**os.environ, **driver.environment, "PYTHONPATH": os.fspath(_ROOT), **more}


def run(
    driver: StandinDriver, child: Callable[..., None], *arguments: str, pass_fds: tuple[int, ...] = (), **more: str
) -> subprocess.CompletedProcess[str]:
    """`child` in a process of its own, with `more` in its environment."""
    return subprocess.run(
        [*program(child), *arguments],
        env=environment(driver, **more),
        pass_fds=pass_fds,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def succeed(driver: StandinDriver, child: Callable[..., None], *arguments: str, **more: str) -> str:
    """What `child` says on stderr. It must end well."""
    ended = run(driver, child, *arguments, **more)
    assert ended.returncode == 0, ended.stderr
    return ended.stderr


def abort(driver: StandinDriver, child: Callable[..., None], *arguments: str) -> str:
    """What `child` says on stderr. The driver must abort it."""
    ended = run(driver, child, *arguments)
    assert ended.returncode == -6, (ended.returncode, ended.stderr)
    return ended.stderr
