"""What goes to the control sockets of other engines."""

from typing import Any

import zmq

from kvd.engines.sglang.messages import Address, Message, encode
from kvd.errors import ErrorCode, refusal
from kvd.net.options import Kind, apply


class Outbox:
    """A socket for each engine. It belongs to one thread, and ends with `context`."""

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
        if engine not in self._sockets:
            socket = self._context.socket(zmq.PUSH, socket_class=zmq.Socket)
            apply(socket, Kind.ENGINE_PUSH)
            host, port = engine
            try:
                socket.connect(f"{tcp(host)}:{port}")
            except zmq.ZMQError:
                socket.close()
                raise
            self._sockets[engine] = socket
        return self._sockets[engine]


def tcp(host: str) -> str:
    """The endpoint of a host, as ZMQ has it, but for the port."""
    return f"tcp://[{host}]" if ":" in host else f"tcp://{host}"
