"""An engine that imports kvd's client loads nothing else that is to be installed than msgspec."""

import json
import subprocess
import sys

LOADED = """
import importlib.metadata, json, sys
import kvd.client, kvd.layout
installed = importlib.metadata.packages_distributions()
names = {name.partition(".")[0] for name in sys.modules}
print(json.dumps(sorted({found for name in names for found in installed.get(name, [])})))
"""

LOADED_ANYWAY = {"kvd", "setuptools", "typing_extensions"}
"""Of the second, a file of paths runs in each Python; msgspec takes the third where it is there."""


def test_a_client_needs_msgspec_alone() -> None:
    loaded = subprocess.run([sys.executable, "-c", LOADED], check=True, capture_output=True, text=True).stdout
    assert set(json.loads(loaded)) - LOADED_ANYWAY == {"msgspec"}
