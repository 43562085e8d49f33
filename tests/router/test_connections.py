"""Clients' connections: too many of them, and those that clients leave or fill in odd ways."""

import asyncio
import contextlib
import json
import logging
import os
import socket
import struct

import pytest
from aiohttp import web

from kvd.router import limits
from kvd.router.clients.connections import client_of
from tests.router.scripted import (
    BODY,
    bound,
    connect,
    decoded,
    hanging,
    head,
    prefilled,
    routed,
    stalled,
    until,
)


async def is_closed(connection: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> bool:
    with contextlib.suppress(ConnectionResetError):
        assert await connection[0].read() == b""
    connection[1].close()
    return True


async def answers(connection: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> bool:
    connection[1].write(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    said = await connection[0].read()
    connection[1].close()
    return said.startswith(b"HTTP/1.1 200 ")


async def test_one_connection_too_many_closes_the_oldest_idle_one_of_the_client_with_the_most(monkeypatch) -> None:
    monkeypatch.setattr(limits, "CONNECTIONS", 4)
    async with routed([prefilled], [decoded]) as stage:
        first = await asyncio.open_connection(*bound(stage), local_addr=("127.0.0.2", 0))
        crowd = [await asyncio.open_connection(*bound(stage)) for _ in range(3)]
        late = await asyncio.open_connection(*bound(stage), local_addr=("127.0.0.3", 0))
        assert await is_closed(crowd[0])
        crowd += [await asyncio.open_connection(*bound(stage))]
        assert await is_closed(crowd[1])
        for connection in (first, late, crowd[2], crowd[3]):
            assert await answers(connection)


async def test_a_connection_whose_request_is_served_is_not_closed_for_others(monkeypatch) -> None:
    monkeypatch.setattr(limits, "CONNECTIONS", 2)
    async with routed([prefilled], [stalled]) as stage:
        asking = [asyncio.create_task(stage.ask()) for _ in range(2)]
        await stage.decode[0].until(lambda server: server.open == 2)
        assert await is_closed(await asyncio.open_connection(*bound(stage)))
        assert stage.decode[0].open == 2
        for task in asking:
            task.cancel()
        await stage.server._intake.idle.wait()
        await until(lambda: not stage.server._connections._open)
        assert await answers(await asyncio.open_connection(*bound(stage)))


async def test_one_that_closes_and_whose_client_takes_nothing_makes_room_too(monkeypatch) -> None:
    """What waits to be written is below the mark at which writing pauses, so no bound for that ends it."""
    monkeypatch.setattr(limits, "CONNECTIONS", 1)

    async def decode(server, request, body):
        return web.Response(body=b"x" * 20_000, content_type="application/json")

    async with routed([prefilled], [decode]) as stage:
        client = connect(stage)
        data = json.dumps(BODY | {"stream": False}).encode()
        connections = stage.server._connections
        await until(lambda: len(connections._open) == 1)
        (stuck,) = connections._open
        while not stuck.transport.get_write_buffer_size():
            asked = len(stage.prefill[0].bodies)
            await asyncio.get_running_loop().sock_sendall(client, head(len(data)) + data)
            await until(lambda asked=asked: len(stage.prefill[0].bodies) > asked)
            await until(lambda: not stuck.serves and stage.decode[0].open == 0)
        stuck.force_close()  # as aiohttp does after `IDLE_SECONDS`
        assert await answers(await asyncio.open_connection(*bound(stage)))
        await until(lambda: not connections._open)
        client.close()


async def test_clients_that_reset_their_connection_at_once_leave_nothing(caplog) -> None:
    async with routed([prefilled], [decoded]) as stage:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(5):
            with socket.create_connection(bound(stage)) as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        assert await answers(await asyncio.open_connection(*bound(stage)))
        await until(lambda: not stage.server._connections._open and len(os.listdir("/proc/self/fd")) == before)
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("192.0.2.1", "192.0.2.2", False),
        ("2001:db8::1", "2001:db8::ffff:1", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("::ffff:192.0.2.1", "::ffff:192.0.2.2", False),
        ("fe80::1%eth0", "fe80::2%eth0", True),
    ],
)
def test_an_ipv6_client_is_known_by_its_network(one: str, other: str, same: bool) -> None:
    assert (client_of(one) == client_of(other)) == same


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("behind", ["a request", "a large one", "many"])
async def test_a_client_that_sends_more_behind_its_request_is_noticed_when_it_leaves(
    behind: str, *, together: bool
) -> None:
    """Of a connection whose next requests wait in it, reading stops: its end would not be seen."""
    data = json.dumps(BODY | {"stream": False}).encode()
    whole = head(len(data)) + data
    more = {
        "a request": whole,
        "a large one": head(10 * limits.CHUNK_BYTES) + b" " * (10 * limits.CHUNK_BYTES),
        "many": b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n" * 40,
    }[behind]
    async with routed([prefilled], [hanging]) as stage:
        reader, writer = await asyncio.open_connection(*stage.server.address.split(":"))
        writer.write(whole + more if together else whole)
        if not together:
            await stage.decode[0].until(lambda server: server.open == 1)
            writer.write(more)
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        await stage.server._intake.idle.wait()
        await stage.decode[0].until(lambda server: server.open == 0)
        assert stage.server._intake.body_bytes.total == 0
        assert await stage.metric('kvd_router_requests_total{outcome="client_gone"}') == 1
