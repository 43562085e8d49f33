"""Four hosts: two that prefill and two that decode, each with a daemon, CURVE between all of them.

Their pools are in host memory or on GPUs, in every combination.
"""

import os
import subprocess

import pytest

from benchmarks.hosts.namespaces import Hosts, why_not
from tests.hosts.stage import HEARTBEAT, PORT, Stage
from tests.support.fleet import Fleet
from tests.support.gpu import MEMORIES, machine_with
from tests.support.keyring import Keyring

MISSING = why_not()


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent.name == "hosts":
            item.add_marker(pytest.mark.hosts)
            if MISSING:
                item.add_marker(pytest.mark.skip(reason=MISSING))


@pytest.fixture(scope="module", params=MEMORIES)
def whole_stage(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hosts")
    source, target = devices = MEMORIES[request.param]
    with machine_with(devices, folder), Hosts("p0", "p1", "d0", "d1") as hosts, Fleet(folder) as fleet:
        ring = Keyring(fleet, folder)
        start = {host.name: ring.daemon(host.name) for host in hosts}
        daemons = {
            host.name: start[host.name](
                within=host.within,
                listen=f"tcp://{host.address}:{PORT}",
                unprotected_transport=host.address,
                heartbeat=str(HEARTBEAT),
                device=source if host.name.startswith("p") else target,
            )
            for host in hosts
        }
        yield Stage(fleet, {host.name: host for host in hosts}, daemons)
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert f"kvd-{os.getpid()}-" not in left


@pytest.fixture
def stage(whole_stage):
    """Everything works again after the test, also after one that failed."""
    yield whole_stage
    whole_stage.mend()
