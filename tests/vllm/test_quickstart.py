"""The commands that the documents give for vLLM print tokens, as they stand there."""

import re

import pytest

from tests.docs.pages import stories
from tests.docs.shell import run

pytestmark = pytest.mark.slow

SECONDS = 540.0
"""Two servers start at once and import vLLM for each of their processes."""

STORIES = stories("runs with vllm")


@pytest.mark.parametrize("story", STORIES)
def test_the_commands_print_tokens(story, tmp_path):
    printed = run(STORIES[story], tmp_path, SECONDS)
    assert re.search(r'"text":"( t\d+){8}"', printed), printed[-4000:]
