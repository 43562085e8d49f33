"""Attacks by strangers on what listens: ZMTP spoken wrongly, HTTP, the transport's own ports, peers without a key."""

import socket
from contextlib import ExitStack, suppress

from kvd.net import keys
from kvd.protocol.peer import Hello
from tests.fuzz import zmtp
from tests.fuzz.attack import BATCH, Attack
from tests.fuzz.messages import PEER_REQUESTS, compose, odd
from tests.fuzz.sockets import dealer, sent

MIB = 1 << 20


class _Zmtp(Attack):
    """Greetings, commands and frames that break ZMTP, and connections that stop in the middle of it."""

    who, cost = "stranger", 8.0

    def address(self) -> str:
        raise NotImplementedError

    def strike(self):
        with ExitStack() as stack:
            for _ in range(4 * BATCH):
                made = stack.enter_context(zmtp.connect(self.address()))
                made.sendall(self._bytes())
                yield 1
                if self.dice.random() < 0.5:
                    made.close()

    def _bytes(self) -> bytes:
        dice, hello = self.dice, zmtp.GREETING + zmtp.ready()
        return dice.choice(
            (
                dice.randbytes(dice.choice((1, 10, 64, 1000))),
                zmtp.GREETING[: dice.randrange(64)],
                b"\xff" + bytes(8) + b"\x7f" + bytes([dice.randrange(256)]) + dice.randbytes(53),
                b"\x01\x00" + dice.randbytes(16),  # ZMTP 1.0
                b"\xff" + bytes(7) + b"\x01\x7f\x01\x05" + dice.randbytes(32),  # ZMTP 2.0
                zmtp.GREETING + dice.randbytes(64),
                zmtp.GREETING + zmtp.ready(kind=dice.choice((b"PUB", b"ROUTER", b"", b"X" * 255))),
                zmtp.GREETING + zmtp.command(b"READY", b"\x0bSocket-Type\xff\xff\xff\xff"),
                hello + zmtp.frame(b"", declared=dice.choice(((1 << 63), (1 << 64) - 1, 16 * MIB + 1, 16 * MIB))),
                hello + zmtp.command(b"PING", dice.randbytes(2 + dice.randrange(64))) * 50,
                hello + zmtp.command(b"SUBSCRIBE", dice.randbytes(64)) * 50,
                hello + bytes([dice.randrange(256)]) + dice.randbytes(100),
                hello + zmtp.frame(b"", more=True) * 50,
            )
        )


class ZmtpOnRequests(_Zmtp):
    name = "zmtp-on-requests"

    def address(self):
        return self.place.requests


class ZmtpOnPeers(_Zmtp):
    name = "zmtp-on-peers"

    def address(self):
        return self.place.address


class _LongIdentities(Attack):
    """Routing ids of 15 MiB, on several connections."""

    who, cost = "stranger", 4000.0
    number = 24

    def address(self) -> str:
        raise NotImplementedError

    def strike(self):
        with ExitStack() as stack:
            for _ in range(self.number):
                yield 1  # first: the daemon may hang up
                made = stack.enter_context(zmtp.connect(self.address()))
                made.sendall(zmtp.GREETING + zmtp.ready(self.dice.randbytes(16) * MIB)[:-MIB])
                made.sendall(bytes(MIB))
                made.sendall(zmtp.frame(b"x"))
            for _ in range(100):
                yield 0


class LongIdentitiesOnRequests(_LongIdentities):
    name = "zmtp-long-identities-on-requests"

    def address(self):
        return self.place.requests


class LongIdentitiesOnPeers(_LongIdentities):
    name = "zmtp-long-identities-on-peers"

    def address(self):
        return self.place.address


class _EndlessMessage(Attack):
    """A message whose parts never end."""

    who, cost = "stranger", 200.0
    number = 300

    def address(self) -> str:
        raise NotImplementedError

    def strike(self):
        part = zmtp.frame(bytes(MIB), more=True)
        with zmtp.speaking(self.address(), self.dice.randbytes(16)) as made:
            for _ in range(self.number):
                yield 1  # first: the daemon hangs up on the part that is one too many
                made.sendall(part)


class EndlessOnRequests(_EndlessMessage):
    name = "zmtp-endless-on-requests"

    def address(self):
        return self.place.requests


class EndlessOnPeers(_EndlessMessage):
    name = "zmtp-endless-on-peers"

    def address(self):
        return self.place.address


class TransportPorts(Attack):
    """Random bytes on the ports that the transport opened."""

    name, who, cost = "transport-ports", "stranger", 8.0

    def strike(self):
        if not self.place.ports:
            yield 0
        for port in self.place.ports:
            with zmtp.connect(port) as made:
                made.sendall(self.dice.randbytes(self.dice.choice((1, 16, 64, 4096))))
                made.sendall(self.dice.randbytes(64) + bytes(64))
                yield 1


class PeersWithoutKeys(Attack):
    """Daemons that nobody listed: without CURVE, or with a key drawn for the occasion."""

    name, who, cost = "peers-not-listed", "stranger", 40.0

    def strike(self):
        pair = keys.generate() if self.dice.random() < 0.7 else None
        with dealer(self.place.address, b"near#%d" % self.dice.randrange(1 << 40), pair) as made:
            for _ in range(8):
                frames = [compose(Hello, daemon="near", incarnation=1), odd(self.dice, PEER_REQUESTS)]
                yield sent(made, frames * 4)
                made.poll(5)


class HttpNoise(Attack):
    """Requests that are none, or odd ones, one after the other on a connection."""

    name, who, cost = "http-noise", "stranger", 8.0

    def strike(self):
        with zmtp.connect(self.place.http) as made:
            for _ in range(8):
                made.sendall(self._request())
                yield 1
                with suppress(TimeoutError):
                    made.settimeout(0.01)
                    made.recv(1 << 16)
                    made.settimeout(zmtp.PATIENCE)

    def _request(self) -> bytes:
        dice = self.dice
        path = dice.choice((b"/metrics", b"/livez", b"/readyz?x=" + b"y" * 9000, b"/" + b"z" * 70000, b"*", b"//", b""))
        verb = dice.choice((b"GET", b"GET", b"GET", b"POST", b"HEAD", b"OPTIONS", dice.randbytes(8), b"PRI"))
        line = verb + b" " + path + dice.choice((b" HTTP/1.1", b" HTTP/1.1", b" HTTP/9.9", b" HTTP/2.0", b"")) + b"\r\n"
        heads = (
            b"Host: x\r\n",
            b"Content-Length: 99999999999\r\n",
            b"Content-Length: -1\r\n",
            b"Transfer-Encoding: chunked\r\n",
            b"Accept: " + b"a/b," * 5000 + b"\r\n",
            b"Accept: application/openmetrics-text; version=1.0.0; q=\xff\r\n",
            b"x: y\r\n" * 200,
            dice.randbytes(64) + b"\r\n",
        )
        return line + b"".join(dice.choices(heads, k=dice.randrange(4))) + b"\r\n"


class HttpSlow(Attack):
    """Many connections whose requests never end."""

    name, who, cost = "http-slow", "stranger", 40.0
    number = 1100

    def strike(self):
        with ExitStack() as stack:
            made: list[socket.socket] = []
            with suppress(TimeoutError):  # no more are let in
                while len(made) < self.number:
                    one = stack.enter_context(zmtp.connect(self.place.http))
                    one.sendall(b"GET /metrics HTTP/1.1\r\n")
                    made.append(one)
                    yield 1
            for _ in range(20):
                for one in made:
                    with suppress(OSError):
                        one.sendall(b"x: y\r\n")
                        yield 1
