"""Connections to servers."""

import socket

from kvd.router import limits
from kvd.router.upstream import _socket


def test_a_host_that_is_gone_is_noticed_though_nothing_is_to_be_sent() -> None:
    """Of an answer that is not streamed nothing comes for minutes."""
    with _socket((socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", ("127.0.0.1", 0))) as made:
        assert made.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
        found = [made.getsockopt(socket.IPPROTO_TCP, option) for option in options]
    seconds, probes = limits.SILENT_SECONDS, limits.PROBES
    assert found == [seconds, seconds, probes, 1000 * seconds * probes]
