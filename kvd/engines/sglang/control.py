"""Control sockets between engines: what arrives at ours, where anybody may send anything, and what goes to others'."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, Final

import zmq
import zmq.asyncio

from kvd.engines.sglang import messages
from kvd.engines.sglang.messages import Address, Message, encode
from kvd.errors import BadRequest, ErrorCode, refusal
from kvd.net.zmq_socket import Kind, apply

logger = logging.getLogger(__name__)

_TURN_SECONDS: Final = 0.005


async def read_messages(control: zmq.asyncio.Socket, heard: Callable[[Message], None]) -> None:
    """Calls `heard` with each message, for good; it must not raise. What is no message is counted.

    If messages do not end, or take long, other tasks have the loop for half of the time.
    """
    plain: zmq.Socket[bytes] = zmq.Socket.shadow(control)  # whose recv_multipart does not wait for the loop
    unreadable = 0
    while True:
        await control.poll()
        began = time.monotonic()
        spent = 0.0
        while spent < _TURN_SECONDS:
            try:
                frames = plain.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                message = messages.decode(frames[0])
            except BadRequest as error:
                unreadable += 1
                if unreadable.bit_count() == 1:  # the 1st, 2nd, 4th, ...: whoever reaches the port can send any
                    logger.warning("%d messages to this engine could not be read, the last: %s", unreadable, error.text)
            else:
                heard(message)
            spent = time.monotonic() - began
        await asyncio.sleep(spent if spent >= _TURN_SECONDS else 0)


MAX_ENGINES: Final = 4096
"""Ranks of other engines that are remembered: each restart of one is another. SGLang's context has 16,384 sockets."""


class Outbox:
    """A socket for each engine, of the last ones. It belongs to one thread, and ends with `context`."""

    def __init__(self, context: "zmq.Context[Any]") -> None:
        self._context = context
        self._sockets: dict[Address, zmq.Socket[bytes]] = {}

    def send(self, engine: Address, message: Message) -> None:
        """Sends without waiting. While the engine cannot be reached, libzmq connects again and again.

        What was under way when a connection ended is lost; what waits for one is not.

        Raises:
            Unavailable: `PEER_LOST`, too many messages to it wait, or its address is none.

        """
        try:
            self._socket(engine).send(encode(message), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            host, port = engine
            text = f"{message!r} cannot be sent to the engine at {host}:{port}: {error}"
            raise refusal(ErrorCode.PEER_LOST, text) from error

    def _socket(self, engine: Address) -> "zmq.Socket[bytes]":
        socket = self._sockets.pop(engine, None) or self._connected(engine)
        self._sockets[engine] = socket
        if len(self._sockets) > MAX_ENGINES:
            self._sockets.pop(next(iter(self._sockets))).close(0)
        return socket

    def _connected(self, engine: Address) -> "zmq.Socket[bytes]":
        socket: zmq.Socket[bytes] = self._context.socket(zmq.PUSH, socket_class=zmq.Socket)
        apply(socket, Kind.ENGINE_PUSH)
        host, port = engine
        try:
            socket.connect(f"{tcp(host)}:{port}")
        except zmq.ZMQError:
            socket.close()
            raise
        return socket


def tcp(host: str) -> str:
    """The endpoint of a host, as ZMQ has it, but for the port."""
    return f"tcp://[{host}]" if ":" in host else f"tcp://{host}"
