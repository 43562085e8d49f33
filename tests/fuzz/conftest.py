import tempfile
from pathlib import Path

import pytest


@pytest.fixture
def folder():
    """Not pytest's own, which other users cannot pass through."""
    with tempfile.TemporaryDirectory() as temporary:
        yield Path(temporary)
