"""Connections of attackers that begin as the protocol wants: sessions, workers' requests, links between daemons."""

import os
import select
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import zmq

from kvd.bench.spec import flat_spec
from kvd.net import keys
from kvd.net.stream import FrameStream
from kvd.protocol import codec
from kvd.protocol.worker import Attach, Attached
from tests.fuzz.attack import Place
from tests.fuzz.messages import compose
from tests.fuzz.zmtp import connect

ANSWER_SECONDS = 5.0
QUEUE = 256
"""Messages that wait in an attacker's own socket: the rest stays unsent until the daemon has taken these."""
SPEC = flat_spec(16, 4096).encode()


@contextmanager
def session(place: Place) -> Iterator[socket.socket]:
    """A connection to the session socket."""
    with connect(place.socket) as made:
        yield made


def packed(content: bytes) -> bytes:
    """A frame of the session socket."""
    return len(content).to_bytes(4, "little") + content


@contextmanager
def attached(place: Place, name: str, dice: Random, spec: bytes = SPEC) -> Iterator[Attached]:
    """A worker that has its pool."""
    stream = FrameStream(connect(place.socket))
    try:
        stream.send(compose(Attach, worker=name, instance=dice.randbytes(16), spec=spec))
        yield _attached(stream)
    finally:
        stream.close()


def _attached(stream: FrameStream) -> Attached:
    if not select.select([stream.fileno()], [], [], ANSWER_SECONDS)[0]:
        raise TimeoutError("no answer to an attach")
    for received in stream.receive() or ():
        for descriptor in received.descriptors:
            os.close(descriptor)
        answer = codec.session_replies.decode(received.content)
        if isinstance(answer, Attached):
            return answer
        raise ConnectionRefusedError(str(answer))
    raise ConnectionResetError("the session ended")


@contextmanager
def dealer(address: str, routing_id: bytes = b"", pair: keys.KeyPair | None = None) -> Iterator["zmq.Socket[bytes]"]:
    """A ZMQ socket at an address; with `pair` it proves that key to whoever has the address's."""
    place, _, key = address.partition("#")
    with zmq.Context() as context, context.socket(zmq.DEALER) as made:
        for option, value in ((zmq.LINGER, 0), (zmq.SNDHWM, QUEUE), (zmq.RCVHWM, QUEUE), (zmq.IPV6, 1)):
            made.setsockopt(option, value)
        if routing_id:
            made.setsockopt(zmq.ROUTING_ID, routing_id)
        if pair is not None:
            server = bytes.fromhex(key) if key else pair.public
            for option, content in (
                (zmq.CURVE_SERVERKEY, server),
                (zmq.CURVE_PUBLICKEY, pair.public),
                (zmq.CURVE_SECRETKEY, pair.secret),
            ):
                made.setsockopt(option, content)
        made.connect(place)
        yield made


@contextmanager
def worker(place: Place, name: str, dice: Random, spec: bytes = SPEC) -> Iterator["zmq.Socket[bytes]"]:
    """The requests' socket of a worker that has its pool."""
    with attached(place, name, dice, spec) as welcome, dealer(welcome.endpoint, welcome.session) as made:
        yield made


def own_key(place: Place) -> keys.KeyPair | None:
    """The key of the admitted daemon."""
    return keys.load(Path(place.key)) if place.key else None


@contextmanager
def peer(place: Place, run: int) -> Iterator["zmq.Socket[bytes]"]:
    """A link of the admitted daemon `evil`."""
    with dealer(place.address, f"evil#{run}".encode(), own_key(place)) as made:
        yield made


def sent(made: "zmq.Socket[bytes]", frames: list[bytes]) -> int:
    """Sends what there is room for; how many of the frames that was. The daemon's pace is the attacker's."""
    for number, content in enumerate(frames):
        try:
            made.send(content, zmq.NOBLOCK, copy=len(content) < 1 << 16)
        except zmq.Again:
            return number
    return len(frames)


def drain(made: "zmq.Socket[bytes]") -> list[bytes]:
    """What has arrived, a few hundred messages at most."""
    found = []
    for _ in range(2 * QUEUE):
        try:
            found.append(made.recv_multipart(zmq.NOBLOCK)[-1])
        except zmq.Again:
            break
    return found
