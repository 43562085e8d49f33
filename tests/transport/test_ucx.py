import pytest

from kvd.transport.nixl.ucx import TCP_SETTINGS, backend_parameters, choose_settings


def chosen(devices: list[str] | None, **environment: str) -> dict[str, str]:
    choose_settings(environment, devices)
    return environment


def test_sizes_of_segments_are_chosen_where_the_operator_has_set_none() -> None:
    assert chosen(None).items() >= TCP_SETTINGS.items()


def test_what_the_operator_set_stays_and_no_size_is_chosen_that_would_not_go_with_it() -> None:
    environment = chosen(None, UCX_TCP_RX_SEG_SIZE="64k", UCX_LOG_LEVEL="info")
    assert (environment["UCX_TCP_RX_SEG_SIZE"], environment["UCX_LOG_LEVEL"]) == ("64k", "info")
    assert "UCX_TCP_TX_SEG_SIZE" not in environment


def test_without_other_hosts_no_transport_is_chosen_that_opens_a_port() -> None:
    assert chosen([])["UCX_TLS"] == "self,sm,cuda"


def test_tcp_that_the_operator_wants_without_other_hosts_keeps_to_the_loopback_interface() -> None:
    environment = chosen([], UCX_TLS="tcp")
    assert (environment["UCX_TLS"], environment["UCX_NET_DEVICES"]) == ("tcp", "lo")


def test_other_hosts_come_by_the_devices_named_and_those_that_the_operator_named_go_before() -> None:
    environment = chosen(["eth0", "mlx5_0:1"])
    assert environment["UCX_NET_DEVICES"] == "eth0,mlx5_0:1"
    assert "UCX_TLS" not in environment
    assert chosen(["eth0"], UCX_NET_DEVICES="eth1")["UCX_NET_DEVICES"] == "eth1"


def test_devices_that_nobody_knows_leave_ucx_its_own_choice() -> None:
    assert chosen(None).keys().isdisjoint({"UCX_TLS", "UCX_NET_DEVICES"})


@pytest.mark.parametrize(
    ("transports", "mode"),
    [
        ("self,sm,cuda", "none"),
        ("posix, cma", "none"),
        ("tcp,self", "peer"),
        ("^tcp", "peer"),
        ("all", "peer"),
        (None, "peer"),
    ],
)
def test_ucx_is_to_notice_dead_peers_where_a_transport_can(
    transports: str | None, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("UCX_TLS", raising=False)
    if transports is not None:
        monkeypatch.setenv("UCX_TLS", transports)
    assert backend_parameters() == {"ucx_error_handling_mode": mode}
