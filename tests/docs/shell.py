"""Runs the blocks of a page as one script, the way a reader would paste them."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.docs.pages import ROOT, Block

_END_SECONDS = 30.0
"""How long what runs in the background may take to end by itself; it removes its shared memory then."""


def run(blocks: list[Block], folder: Path, seconds: float, within: Sequence[str] = ()) -> str:
    """What the blocks print; whatever they started in the background is killed at the end. `within` runs the shell.

    Raises:
        AssertionError: A command failed, or all took longer than `seconds`; the text is what was printed.

    """
    parts = []
    for block in blocks:
        if block.language == "python":
            script = folder / f"{block.page.stem}-{block.line}.py"
            script.write_text(block.text)
            parts.append(f"python {script.name}\n")
        else:
            parts.append(block.text)
    log = folder / "output.log"
    variables = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    with log.open("wb") as output:
        shell = subprocess.Popen(
            [*within, "bash", "-euo", "pipefail", "-c", "".join(parts)],
            cwd=folder,
            env=os.environ | variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = shell.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end(shell.pid)
            shell.wait()
    printed = log.read_text(errors="replace")
    places = ", ".join(block.place for block in blocks)
    assert status == 0, f"{places}: {'took too long' if status is None else f'status {status}'}\n{printed[-4000:]}"
    return printed


def _end(group: int) -> None:
    """Ends a process group: SIGTERM, and SIGKILL for what is still there."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGTERM)
        deadline = time.monotonic() + _END_SECONDS
        while time.monotonic() < deadline:
            os.killpg(group, 0)
            time.sleep(0.05)
        os.killpg(group, signal.SIGKILL)
