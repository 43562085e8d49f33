import subprocess
import sys

import pytest

from kvd.cli.main import main
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
    assert run.stderr == f"kvd {command}: {missing} is not installed: pip install '.[{extra}]' in a clone of kvd\n"


@pytest.mark.parametrize("value", ["nan", "inf", "1e300", "-1", "soon"])
@pytest.mark.parametrize("flag", ["status --timeout", "top --interval", "drain --wait", "bench --seconds"])
def test_a_time_that_cannot_be_waited_for_is_refused_with_its_flag(flag, value, capsys):
    command, name = flag.split()
    with pytest.raises(SystemExit) as ended:
        main([command, f"{name}={value}"])
    assert ended.value.code == 2
    assert f"argument {name}: {value!r} must be from 0 to 86400 seconds" in capsys.readouterr().err
