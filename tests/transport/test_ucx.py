from kvd.transport.nixl.ucx import TCP_SETTINGS, choose_settings


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


def test_devices_that_nobody_knows_leave_ucx_its_own_choice() -> None:
    assert chosen(None).keys().isdisjoint({"UCX_TLS", "UCX_NET_DEVICES"})
