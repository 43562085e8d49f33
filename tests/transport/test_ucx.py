import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvd.transport.nixl.ucx import TCP_SETTINGS, choose_settings, set_by_operator
from tests.support.elsewhere import network_settings
from tests.support.patience import PATIENCE
from tests.support.ports import free_port, own_address


def chosen(devices: list[str] | None, **environment: str) -> dict[str, str]:
    choose_settings(environment, devices)
    return environment


def test_sizes_of_segments_are_chosen_where_the_operator_has_set_none() -> None:
    assert chosen(None).items() >= TCP_SETTINGS.items()


def test_what_the_operator_set_stays_and_no_size_is_chosen_that_would_not_go_with_it() -> None:
    environment = chosen(None, UCX_TCP_RX_SEG_SIZE="64k", UCX_LOG_LEVEL="info")
    assert (environment["UCX_TCP_RX_SEG_SIZE"], environment["UCX_LOG_LEVEL"]) == ("64k", "info")
    assert "UCX_TCP_TX_SEG_SIZE" not in environment


def test_other_hosts_come_by_the_devices_named_and_those_that_the_operator_named_go_before() -> None:
    environment = chosen(["eth0", "mlx5_0:1"])
    assert environment["UCX_NET_DEVICES"] == "eth0,mlx5_0:1"
    assert "UCX_TLS" not in environment
    assert chosen(["eth0"], UCX_NET_DEVICES="eth1")["UCX_NET_DEVICES"] == "eth1"


def test_the_transport_listens_on_ports_of_the_range_that_is_named_unless_the_operator_named_another() -> None:
    environment: dict[str, str] = {}
    choose_settings(environment, ["eth0"], "9930-9961")
    assert environment["UCX_TCP_PORT_RANGE"] == "9930-9961"
    choose_settings(environment, ["eth0"], "1-2")
    assert environment["UCX_TCP_PORT_RANGE"] == "9930-9961"


def test_devices_that_nobody_knows_leave_ucx_its_own_choice() -> None:
    assert chosen(None).keys().isdisjoint({"UCX_TLS", "UCX_NET_DEVICES"})


def test_an_error_names_what_the_operator_set_and_not_what_kvd_chose_itself() -> None:
    environment = chosen(None, UCX_TLS="rc", UCX_LOG_LEVEL="info", PATH="/bin")
    assert set_by_operator(environment) == "UCX_LOG_LEVEL=info UCX_TLS=rc"


@pytest.mark.real
@pytest.mark.parametrize("variable", ["UCX_TLS=rc,cuda_ipc,cuda_copy", "UCX_NET_DEVICES=mlx5_9:1"])
def test_a_variable_under_which_ucx_does_not_start_ends_the_daemon_in_one_line_that_names_it(
    variable: str, tmp_path: Path
) -> None:
    pytest.importorskip("nixl_cu12", reason="nixl is not installed")
    name, _, value = variable.partition("=")
    settings = {"socket": str(tmp_path / "s"), **network_settings(own_address(), free_port())}
    flags = [part for key, flag in settings.items() for part in (f"--{key}", flag)]
    ended = subprocess.run(
        [sys.executable, "-m", "kvd.cli.main", "serve", *flags],
        env=os.environ | {name: value},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    (said,) = [line for line in ended.stderr.splitlines() if "NIXL INFO" not in line]
    assert said.startswith("kvd serve: bad_config: UCX")
    assert variable in said
    assert ended.returncode == 2
