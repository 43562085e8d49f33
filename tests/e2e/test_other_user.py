"""Another user of the host, over real sockets: attempts of each kind get nothing, and are counted."""

import json
import os
import select
import socket
import tempfile
import urllib.request
from pathlib import Path

import pytest
import zmq

from kvd.bench.spec import flat_spec
from kvd.net.stream import FrameStream
from kvd.net.zmq_socket import Kind, apply
from kvd.protocol import codec
from kvd.protocol.peer import Hello
from kvd.protocol.types import Span
from kvd.protocol.worker import Attach, Offer
from tests.support.fleet import Fleet, until
from tests.support.patience import PATIENCE

pytestmark = [pytest.mark.real, pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user takes root")]

ATTEMPTS = 20
NOBODY = 65534
SPEC = flat_spec(16, 16).encode()


class Session:
    """The session socket, without a client that would know better."""

    def __init__(self, path):
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connected.connect(str(path))
        self._stream = FrameStream(connected)

    def attach(self, name):
        self._stream.send(codec.encode(Attach(name, bytes(16), SPEC)))
        assert select.select([self._stream.fileno()], [], [], PATIENCE)[0]
        (frame,) = self._stream.receive()
        for descriptor in frame.descriptors:
            os.close(descriptor)
        return codec.session_replies.decode(frame.content)

    def close(self):
        self._stream.close()


def attach_in_vain(path):
    session = Session(path)
    return [getattr(session.attach("mine" if n % 2 else f"n{n}"), "code", None) for n in range(ATTEMPTS)]


def offer_in_the_name_of(endpoint, session):
    offer = Offer(1, "theft", 16, (Span(0, 0, bytes(4)),), 60.0, bytes(16))
    with zmq.Context() as context, context.socket(zmq.DEALER) as thief:
        thief.setsockopt(zmq.LINGER, -1)
        thief.setsockopt(zmq.ROUTING_ID, session)
        thief.connect(endpoint)
        for _ in range(ATTEMPTS):
            thief.send(codec.encode(offer))
        return [bool(thief.poll(300))]


def connects_until_its_end(path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        stranger.settimeout(PATIENCE)
        stranger.connect(path)
        return "said something" if stranger.recv(1) else "ended"


def hello_to(address, milliseconds):
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        apply(stranger, Kind.PEER_DEALER)
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.setsockopt(zmq.ROUTING_ID, b"stranger#1#0")
        stranger.connect(address)
        stranger.send(codec.encode(Hello("stranger", 1)))
        return [bool(stranger.poll(milliseconds))]


def as_nobody(work, *arguments):
    """What `work` returns in a process of another user's."""
    source, sink = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            os.write(sink, json.dumps(work(*arguments)).encode())
        finally:
            os._exit(0)
    os.close(sink)
    with os.fdopen(source, "rb") as stream:
        answer = stream.read()
    os.waitpid(child, 0)
    return json.loads(answer)


def refused(daemon, where):
    line = f'kvd_requests_refused_total{{code="not_permitted",socket="{where}"}} '
    with urllib.request.urlopen(f"http://{daemon.serving()['http']}/metrics", timeout=PATIENCE) as answer:
        found = [text for text in answer.read().decode().splitlines() if text.startswith(line)]
    return float(found[0].split()[-1]) if found else 0.0


@pytest.fixture
def daemon():
    with tempfile.TemporaryDirectory(prefix="kvd-") as folder, Fleet(Path(folder)) as fleet:
        os.chmod(folder, 0o755)  # noqa: S103 - what is tested is that this does not help
        started = fleet.daemon("d", socket_mode="0666")
        started.serving()
        yield started


def test_another_user_may_not_attach_however_often_it_tries(daemon):
    assert as_nobody(attach_in_vain, daemon.socket) == ["not_permitted"] * ATTEMPTS
    assert refused(daemon, "session") == ATTEMPTS
    assert daemon.log.read_text().count('"attach not permitted"') == 1


def test_another_user_that_may_not_attach_makes_no_requests(daemon):
    assert as_nobody(connects_until_its_end, f"{daemon.socket}.zmq") == "ended"


def test_another_user_with_a_workers_session_id_is_neither_answered_nor_obeyed(tmp_path):
    policy = tmp_path / "policy.toml"
    policy.write_text(f"[[workers]]\nuid = {NOBODY}\npools = ['theirs']\n")
    with tempfile.TemporaryDirectory(prefix="kvd-") as folder, Fleet(Path(folder)) as fleet:
        os.chmod(folder, 0o755)  # noqa: S103 - what is tested is that this does not help
        daemon = fleet.daemon("d", socket_mode="0666", worker_policy=str(policy))
        daemon.serving()
        impersonate(daemon)


def impersonate(daemon):
    owner = Session(daemon.socket)
    attached = owner.attach("mine")
    assert as_nobody(offer_in_the_name_of, attached.endpoint, attached.session) == [False]
    for _ in until("every attempt is counted"):
        if refused(daemon, "worker") == ATTEMPTS:
            break
    assert daemon.log.read_text().count('"session of another user"') == 1
    with urllib.request.urlopen(f"http://{daemon.serving()['http']}/metrics", timeout=PATIENCE) as answer:
        assert "kvd_leases_active 0.0" in answer.read().decode()
    owner.close()


def test_another_user_that_says_hello_as_a_peer_is_not_welcome(daemon):
    address = daemon.serving()["address"]
    assert address == f"ipc://{daemon.socket}.peers"
    assert hello_to(address, PATIENCE * 1000) == [True]
    assert as_nobody(hello_to, address, 300) == [False]
