"""Daemons of one host that the kernel keeps apart: in PID and user namespaces of their own, or run as two users."""

import asyncio
import ctypes
import errno
import mmap
import os
import select
import shutil
import socket
import tempfile
import urllib.request
from pathlib import Path

import pytest

from kvd.doctor import Level
from kvd.doctor.daemon import check_daemon
from kvd.memory.memfd import Backing, MemfdProvider
from kvd.net.inquiry import Inquiry
from kvd.net.stream import FrameStream
from kvd.protocol.codec import encode, export_addresses
from kvd.protocol.export import Import
from kvd.protocol.status import decode
from kvd.transport.interface import Region
from kvd.transport.samehost.transport import SameHostTransport
from tests.e2e.test_other_user import NOBODY, as_nobody
from tests.support.elsewhere import network_settings
from tests.support.fleet import Fleet
from tests.support.keyring import Keyring
from tests.support.patience import PATIENCE
from tests.support.ports import own_address

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(os.geteuid() != 0, reason="namespaces and other users take root"),
    pytest.mark.skipif(
        not (shutil.which("unshare") and shutil.which("setpriv")), reason="needs unshare and setpriv (util-linux)"
    ),
]

NAMESPACES = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc")
CLONE_NEWUSER = 0x10000000
PR_SET_DUMPABLE = 4
USERS = {"p": 65533, "d": 65534}
BLOCKS = list(range(32))
SMALL = [40]


@pytest.fixture
def folder():
    """A folder that all users share, as a node's folder of sockets is shared by pods."""
    with tempfile.TemporaryDirectory(prefix="kvd-") as made:
        os.chmod(made, 0o1777)  # noqa: S103 - as /tmp
        yield Path(made)


@pytest.fixture
def hosts(folder):
    with Fleet(folder) as fleet:
        yield fleet


def as_user(user):
    """Becomes that user; the capability lets it run this interpreter, wherever it lies, and write nowhere."""
    capability = ("--inh-caps=-all,+dac_read_search", "--ambient-caps=-all,+dac_read_search")
    return ("setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", *capability)


def fences_held(daemon):
    with urllib.request.urlopen(f"http://{daemon.serving()['http']}/metrics", timeout=PATIENCE) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith('kvd_fences_total{answer="held"}'))


def check_a_pair(fleet, producer, consumer):
    """Pulls a small and a long read: the bytes are right, copied within the host, and proven by messages."""
    prefill, decode_worker = (fleet.worker(daemon, daemon.name, block_bytes=65536) for daemon in (producer, consumer))
    for number, ids in enumerate((BLOCKS, SMALL)):
        prefill.call("fill", ids=ids, value=7 + number)
        ticket = prefill.call("offer", name=f"o{number}", ids=ids)
        decode_worker.call("pull", name=f"r{number}", ticket=ticket, ids=ids)
        ended = decode_worker.outcome(f"r{number}")
        assert ended["kind"] == "Done", ended
        assert set(decode_worker.call("values", ids=ids)) == {7 + number}
    with Inquiry(str(consumer.socket)) as inquiry:
        (peer,) = decode(inquiry.status(PATIENCE)).handshake
    assert (peer.path, peer.slow) == ("copy/memory", None)
    assert fences_held(producer) == 2


def test_daemons_in_namespaces_of_their_own_copy_within_the_host_and_prove_by_message(hosts):
    daemons = [hosts.daemon(name, within=NAMESPACES) for name in ("p", "d")]
    check_a_pair(hosts, *daemons)
    for daemon in daemons:
        daemon.kill()  # unshare takes no other signal


@pytest.mark.parametrize("listen", ["tcp://127.0.0.1:0", "ipc"])
def test_daemons_of_two_users_with_keys_copy_within_the_host_and_prove_by_message(hosts, folder, listen):
    ring = Keyring(hosts, folder)
    starts = {name: ring.daemon(name) for name in USERS}
    for name, user in USERS.items():
        os.chown(folder / f"{name}.key", user, user)
    flags = {} if listen == "ipc" else {"listen": listen}
    check_a_pair(hosts, *(start(within=as_user(USERS[name]), **flags) for name, start in starts.items()))


def test_a_peer_of_this_host_whose_sockets_are_not_mounted_is_read_over_the_network_and_called_slow(hosts, folder):
    (folder / "hidden").mkdir()
    address = network_settings(own_address())
    producer = hosts.daemon("p", socket=str(folder / "hidden/p.sock"), **address)
    hide = f'mount -t tmpfs none {folder / "hidden"} && exec "$@"'
    consumer = hosts.daemon("d", within=("unshare", "--mount", "sh", "-c", hide, "sh"), **address)
    producer.serving()
    prefill, decode_worker = hosts.worker(producer, "p"), hosts.worker(consumer, "d")
    prefill.call("fill", ids=[1], value=7)
    decode_worker.call("pull", name="r", ticket=prefill.call("offer", name="o", ids=[1]), ids=[3])
    assert decode_worker.outcome("r")["kind"] == "Done"
    assert decode_worker.call("values", ids=[3]) == [7]
    (finding,) = [found for found in check_daemon(str(consumer.socket), PATIENCE) if found.subject == "peer p"]
    assert finding.level is Level.SLOW
    assert "it is on this host, but NIXL reads it as if from another one: /" in finding.text
    assert "mount the daemons' sockets at one path" in finding.text


def write_in_vain(metadata):
    """Imports as another daemon does, then tries to write; the errors that this gave."""
    address = export_addresses.decode(bytes.fromhex(metadata))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connected:
        connected.connect(address.path)
        stream = FrameStream(connected)
        stream.send(encode(Import(address.token)))
        assert select.select([connected], [], [], PATIENCE)[0]
        (descriptor,) = stream.receive()[0].descriptors
        assert mmap.mmap(descriptor, mmap.PAGESIZE, mmap.MAP_SHARED, mmap.PROT_READ)[:4] == b"kept"
        attempts = (
            lambda: os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR),
            lambda: os.fchmod(descriptor, 0o666),
            lambda: mmap.mmap(descriptor, mmap.PAGESIZE, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE),
            lambda: os.pwrite(descriptor, b"lost", 0),
        )
        return [errno_of(attempt) for attempt in attempts]


def write_in_vain_as_a_namesake(metadata):
    """In a user namespace of its own, where this process has the number that the pool's owner has outside."""
    libc = ctypes.CDLL(None)
    assert libc.prctl(PR_SET_DUMPABLE, 1) == 0  # else its own files in /proc are root's since it became this user
    assert libc.unshare(CLONE_NEWUSER) == 0
    Path("/proc/self/uid_map").write_text(f"0 {NOBODY} 1")
    assert os.geteuid() == 0
    return write_in_vain(metadata)


def errno_of(attempt):
    try:
        attempt()
    except OSError as error:
        return error.errno
    return 0


@pytest.mark.parametrize("attack", [write_in_vain, write_in_vain_as_a_namesake])
async def test_what_a_daemon_of_another_user_imports_cannot_be_written_nor_opened_for_writing(folder, attack):
    """Another user is also who has the same number in another user namespace, as in pods with `hostUsers: false`."""
    pool = MemfdProvider(Backing.PLAIN).allocate("pool", 1 << 20)
    os.pwrite(pool.descriptor, b"kept", 0)
    loop = asyncio.get_running_loop()
    transport = SameHostTransport("p", loop, str(folder / "p.pools"), host="this", threads=1, mode=0o666)
    transport.start(lambda _event: None)
    transport.register(1, Region(pool.base, pool.size, pool.descriptor, length=pool.length))
    found = await asyncio.to_thread(as_nobody, attack, transport.metadata.hex())
    assert found == [errno.EACCES, errno.EPERM, errno.EACCES, errno.EBADF]
    assert os.pread(pool.descriptor, 4, 0) == b"kept"
    transport.stop()
    pool.close()
