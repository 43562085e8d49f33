"""The HTTP port: /metrics for Prometheus, /livez and /readyz for whoever supervises the daemon.

It runs on a thread of its own, so that it answers, truthfully, when the event loop hangs.
"""

import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from kvd.errors import BadRequest, ErrorCode
from kvd.health import Health


class HttpServer:
    """Serves until closed. `address` is host:port; port 0 takes a free one.

    Raises:
        BadRequest: `BAD_CONFIG`, the address cannot be bound.

    """

    def __init__(self, address: str, registry: CollectorRegistry, health: Health) -> None:
        host, _, port = address.rpartition(":")
        handler = type("Handler", (_Handler,), {"registry": registry, "health": health})
        try:
            self._server = ThreadingHTTPServer((host.strip("[]"), int(port)), handler)
        except (OSError, OverflowError) as error:
            raise BadRequest(ErrorCode.BAD_CONFIG, f"http: cannot listen on {address!r}: {error}") from error
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="kvd-http", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """host:port that is listened on."""
        host, port = self._server.server_address[:2]
        return f"{host!s}:{port}"

    def close(self) -> None:
        """Stops listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    registry: CollectorRegistry
    health: Health
    protocol_version = "HTTP/1.1"
    timeout = 10

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            encode, kind = choose_encoder(self.headers.get("Accept", ""))
            self._answer(HTTPStatus.OK, encode(self.registry), kind)
        elif path == "/livez":
            alive = self.health.alive
            text = "alive\n" if alive else "the event loop, an actor or the transport does not answer\n"
            self._answer(HTTPStatus.OK if alive else HTTPStatus.SERVICE_UNAVAILABLE, text.encode())
        elif path == "/readyz":
            reasons = self.health.reasons
            text = "".join(f"{name}: {reason}\n" for name, reason in sorted(reasons.items())) or "ready\n"
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE if reasons else HTTPStatus.OK, text.encode())
        else:
            self._answer(HTTPStatus.NOT_FOUND, b"paths: /metrics, /livez, /readyz\n")

    def _answer(self, status: HTTPStatus, body: bytes, kind: str = "text/plain; charset=utf-8") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Scrapes are no events."""
