"""A daemon loads what it needs: no torch nor CUDA for pools of host memory, no NIXL without other hosts."""

import re
from pathlib import Path

import pytest

from tests.support.elsewhere import network_settings
from tests.support.fleet import Fleet, until
from tests.support.ports import own_address
from tests.support.transports import transport_of

pytestmark = pytest.mark.real

EACH_IMPORT = ("env", "PYTHONPROFILEIMPORTTIME=1")
"""A line on standard error for each module."""


@pytest.mark.parametrize("network", [False, True])
def test_a_daemon_of_host_memory_loads_neither_torch_nor_cuda_and_nixl_only_for_other_hosts(
    tmp_path: Path, network: bool
) -> None:
    settings = network_settings(own_address()) if network else {}
    with Fleet(tmp_path) as fleet:
        daemon = fleet.daemon("light", within=EACH_IMPORT, **settings)
        for _ in until("the daemon serves"):
            if '"event": "serving"' in daemon.log.read_text():
                break
        imported = set(re.findall(r"^import time:.*\| +(\S+)$", daemon.log.read_text(), re.MULTILINE))
        assert "kvd.daemon.server" in imported, "the log names what is imported"
        assert ("nixl_cu12._api" in imported) is network
        assert not {name for name in imported if name.split(".")[0] in ("torch", "cuda", "cupy")}
        mapped = Path(f"/proc/{daemon.child.pid}/maps").read_text()
        assert "libuct" not in mapped, "UCX is loaded by the transport's process alone"
        if network:
            mapped += Path(f"/proc/{transport_of(daemon)}/maps").read_text()
            assert "libuct" in mapped
        assert not re.findall(r"lib(?:torch|c10|cuda|nvidia)\S*|libuc[mt]_cuda\S*", mapped)
