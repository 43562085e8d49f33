"""Two hosts of a network that has IPv6 addresses alone."""

from benchmarks.hosts.namespaces import Hosts
from tests.hosts.stage import PORT, Stage
from tests.support.fleet import Fleet
from tests.support.patience import PATIENCE


def test_blocks_move_between_hosts_that_have_ipv6_addresses_alone(tmp_path):
    with Hosts("p0", "d0", ipv6=True) as hosts, Fleet(tmp_path) as fleet:
        daemons = {
            host.name: fleet.daemon(
                host.name,
                within=host.within,
                listen=f"tcp://[{host.address}]:{PORT}",
                insecure="true",
                unprotected_transport=host.address,
            )
            for host in hosts
        }
        stage = Stage(fleet, {host.name: host for host in hosts}, daemons)
        stage.arrived("d0", *stage.pull("p0", "d0", PATIENCE))
        (peer,) = stage.workers["d0"].call("status")["handshake"]
        assert (peer["address"].startswith(f"tcp://[fd77::1]:{PORT}"), peer["path"]) == (True, "tcp/eth0")
