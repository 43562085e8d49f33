"""A daemon whose pools are host memory loads neither torch nor CUDA, installed or not."""

import re
from pathlib import Path

import pytest

from tests.support.fleet import Fleet, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(60)]


def test_a_daemon_of_host_memory_loads_neither_torch_nor_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")  # a line on standard error for each module
    with Fleet(tmp_path) as fleet:
        daemon = fleet.daemon("light")
        for _ in until("the daemon serves"):
            if '"event": "serving"' in daemon.log.read_text():
                break
        imported = set(re.findall(r"^import time:.*\| +(\S+)$", daemon.log.read_text(), re.MULTILINE))
        assert {"kvd.daemon.server", "nixl_cu12._api"} <= imported, "the log names what is imported"
        assert not {name for name in imported if name.split(".")[0] in ("torch", "cuda", "cupy")}
        mapped = Path(f"/proc/{daemon.child.pid}/maps").read_text()
        assert "libuct" in mapped
        assert not re.findall(r"lib(?:torch|c10|cuda|nvidia)\S*|libuc[mt]_cuda\S*", mapped)
