"""A daemon that others take to be on another host: its kernel calls itself another one, and it is reached over TCP."""

import os
import uuid
from pathlib import Path

import pytest

from tests.support.ports import free_port, own_address


def network_settings(address: str, port: int = 0) -> dict[str, str]:
    """Of a daemon that peers on other hosts reach at `address`; many may run here beside each other."""
    return {
        "listen": f"tcp://{address}:{port}",
        "insecure": "true",
        "unprotected-transport": address,
        "transport-ports": "21000-28999",
    }


def elsewhere(folder: Path, name: str) -> tuple[tuple[str, ...], dict[str, str]]:
    """The command prefix and the settings of such a daemon.

    Skips the test where this machine has no address but the loopback interface's, or we are not root.
    """
    if os.geteuid() != 0:
        pytest.skip("a boot id of its own takes root")
    boot_id = folder / f"{name}.boot_id"
    boot_id.write_text(f"{uuid.uuid4()}\n")
    own_boot = f'mount --bind {boot_id} /proc/sys/kernel/random/boot_id && exec "$@"'
    settings = network_settings(own_address(), free_port())
    return ("unshare", "--mount", "sh", "-c", own_boot, "sh"), settings
