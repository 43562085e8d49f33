"""A pool in a GPU's memory, while neither its daemon nor its worker runs."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from kvd.daemon.systemd import DescriptorStore, Notifier
from kvd.memory.provider import provider_for
from tests.daemon.test_systemd import Systemd
from tests.support.gpu import over_standin

SIZE = 5 << 20
DAEMON = """
import os, signal
from kvd.daemon.systemd import DescriptorStore, Notifier
from kvd.memory.provider import provider_for

pool = provider_for("cuda:0").allocate("w", int(os.environ["SIZE"]))
pool._mapping.write(9, b"kept")
DescriptorStore(Notifier(os.environ), {}).keep("w", 1000, b"spec", pool.descriptor)
os.kill(os.getpid(), signal.SIGKILL)
"""


@over_standin()
def test_systemds_store_keeps_a_gpus_pool_for_the_next_daemon():
    with tempfile.TemporaryDirectory() as folder:
        systemd = Systemd(Path(folder) / "notify")
        environment = {**os.environ, "NOTIFY_SOCKET": systemd.path, "SIZE": str(SIZE)}
        ended = subprocess.run([sys.executable, "-c", DAEMON], env=environment, timeout=60, check=False)
        assert ended.returncode == -signal.SIGKILL
        assert any("FDPOLL=0" in text for text in systemd.read())
        received = {name: os.dup(descriptor) for name, descriptor in systemd.kept.items()}
        notifier = Notifier({"NOTIFY_SOCKET": systemd.path})
        store = DescriptorStore(notifier, received)
        pool = provider_for("cuda:0").adopt(store.take("w", 1000, b"spec", 0), SIZE)
        assert pool._mapping.read(9, 4) == b"kept"
        pool.free()
        notifier.close()
        systemd.close()
