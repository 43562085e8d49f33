"""Attacks by clients on the router: bodies that are small on the wire and large once they are read."""

import gzip
import zlib
from contextlib import suppress

from tests.fuzz import zmtp
from tests.fuzz.attack import BATCH, Attack

MIB = 1 << 20
BOMB = bytes(64 * MIB)
PLAIN = b'{"model": "m", "prompt": "a"}'


def deflated(data: bytes, bits: int) -> bytes:
    """As zlib (15), raw (-15) or gzip (31)."""
    made = zlib.compressobj(9, zlib.DEFLATED, bits)
    return made.compress(data) + made.flush()


GROWING = {
    b"gzip": gzip.compress(b'{"model": "m", "prompt": "' + BOMB + b'"}'),
    b"deflate": deflated(b'{"model": "m", "prompt": "' + BOMB + b'"}', 15),
    b"x-gzip": gzip.compress(gzip.compress(BOMB)),
    b"deflate, gzip": gzip.compress(deflated(BOMB, -15)),
    b"br": bytes.fromhex("ffff3ff8ffff") * 100,
    b"zstd": b"\x28\xb5\x2f\xfd" + bytes(100),
}


class RouterBombs(Attack):
    """64 MiB in some kilobytes, encoded as a whole or for the transfer; plain bodies that are said to be encoded."""

    name, who, cost = "router-bombs", "client", 40.0

    def strike(self):
        for _ in range(BATCH):
            with zmtp.connect(self.place.router) as made, suppress(TimeoutError):
                made.sendall(self._request())
                yield 1
                made.recv(1 << 16)

    def _request(self) -> bytes:
        kind, body = self.dice.choice(list(GROWING.items()))
        body = self.dice.choice((body, body, body[: len(body) // 2], PLAIN))
        header = self.dice.choice((b"Content-Encoding", b"Content-Encoding", b"Transfer-Encoding", b"X-Encoding"))
        heads = [header + b": " + kind]
        if header == b"Transfer-Encoding":
            heads = [header + b": " + kind + b", chunked"]
            body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
        else:
            heads.append(b"Content-Length: %d" % len(body))
        return _post(self.dice.choice((b"/v1/completions", b"/v1/chat/completions")), heads, body)


class RouterDeep(Attack):
    """JSON that is deep, wide, or long in one number or escape: small bodies that take much to read."""

    name, who, cost = "router-deep", "client", 40.0

    def strike(self):
        for _ in range(BATCH):
            with zmtp.connect(self.place.router) as made, suppress(TimeoutError):
                body = self._body()
                path = self.dice.choice((b"/v1/completions", b"/v1/chat/completions"))
                made.sendall(_post(path, [b"Content-Length: %d" % len(body)], body))
                yield 1
                made.recv(1 << 16)

    def _body(self) -> bytes:
        many = self.dice.choice((500, 5000, 50_000))
        inner = self.dice.choice(
            (
                b"[" * many + b"]" * many,
                b'{"a":' * many + b"1" + b"}" * many,
                b"[" * many,
                b'{"a":' * many,
                b"9" * many,
                b"1e" + b"9" * many,
                b'"' + b"\\ud800" * many + b'"',
                b'"' + b"\\u0000" * many + b'"',
                b"[" + b"0," * many + b"0]",
                b"{" + b",".join(b'"k%d":0' % number for number in range(many)) + b"}",
                b'{"a":0,' * many,
            )
        )
        field = self.dice.choice((b"prompt", b"messages", b"stop", b"kv_transfer_params", b"model", b"x"))
        return self.dice.choice((b'{"model": "m", "prompt": "a", "%s": %s}' % (field, inner), inner))


def _post(path: bytes, heads: list[bytes], body: bytes) -> bytes:
    lines = [b"POST " + path + b" HTTP/1.1", b"Host: x", b"Content-Type: application/json", *heads]
    return b"\r\n".join([*lines, b"", body])
