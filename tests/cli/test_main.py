import subprocess
import sys

import pytest

from tests.support.patience import PATIENCE


@pytest.mark.real
@pytest.mark.parametrize(
    ("command", "missing", "extra"),
    [("demo", "torch", "demo"), ("plan", "numpy", "daemon"), ("router", "aiohttp", "router")],
)
def test_a_command_says_which_extra_brings_what_it_lacks(command, missing, extra):
    code = f"import sys; sys.modules[{missing!r}] = None; from kvd.cli.main import main; sys.exit(main([{command!r}]))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert run.returncode == 2
    assert run.stderr == f"kvd {command}: {missing} is not installed: pip install 'kvd[{extra}]'\n"
