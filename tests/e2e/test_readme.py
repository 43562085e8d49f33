"""What the README shows runs as it stands there."""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

README = Path(__file__).parents[2] / "README.md"


def test_the_snippet_of_the_readme_runs(fleet):
    snippets = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(snippets) == 1
    prefill, decode = fleet.daemon("p"), fleet.daemon("d")
    prefill.serving(), decode.serving()
    names = {"prefill_socket": str(prefill.socket), "decode_socket": str(decode.socket)}
    exec(compile(snippets[0], str(README), "exec"), names)  # noqa: S102 - our own text
