"""What goes to the control sockets of other engines."""

from typing import Any, Final

import zmq

from kvd.engines.sglang.messages import Address, Message, encode
from kvd.errors import ErrorCode, refusal
from kvd.net.options import Kind, apply

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
