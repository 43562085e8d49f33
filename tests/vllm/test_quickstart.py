"""The commands that the documents give for vLLM print tokens, as they stand there."""

import os
import re
from pathlib import Path

import pytest

from tests.docs.pages import stories
from tests.docs.shell import run

pytestmark = pytest.mark.slow

SECONDS = 540.0
"""Two servers start at once and import vLLM for each of their processes."""

STORIES = stories("runs with vllm")

ALONE = """
ip link set lo up && ip address add 192.0.2.1/32 dev lo && ip route add default dev lo
mount --bind "$0" /dev/shm
exec "$@"
"""
"""A network and shared memory of its own: nobody else has the ports. vLLM looks for its address at the way out."""


@pytest.mark.parametrize("story", STORIES)
def test_the_commands_print_tokens(story: str, tmp_path: Path) -> None:
    memory = tmp_path / "shm"
    memory.mkdir()
    root = os.geteuid() == 0  # others have the machine's ports, which may be taken
    within = ["unshare", "--net", "--mount", "bash", "-euo", "pipefail", "-c", ALONE, str(memory)] if root else []
    printed = run(STORIES[story], tmp_path, SECONDS, within)
    assert re.search(r'"text":"( t\d+){8}"', printed), printed[-4000:]
    assert not list(memory.iterdir())
