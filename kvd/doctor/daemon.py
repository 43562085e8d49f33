"""The daemon on this host: its socket, who may connect, and its status."""

import contextlib
import grp
import os
import pwd
import socket
import stat
from collections.abc import Callable, Iterator
from glob import glob
from typing import Final

from kvd.doctor import Finding, Level
from kvd.doctor.host import check_groups, check_wait
from kvd.errors import KvdError
from kvd.net.inquiry import Inquiry
from kvd.net.unix import Credentials, credentials
from kvd.protocol.address import POOLS
from kvd.protocol.status import PeerStatus, decode
from kvd.transport.path import STAGED, how_read

_SAME_USER: Final = (
    "nothing, where they trust each other; else run each as a user of its own, with keys "
    "(docs/security.md, Within a host)"
)
_UNREACHED: Final = (
    "if it was heard just now, the network of the data has failed: look at that of `unprotected_transport` on both "
    "hosts, its link, routes and firewall (`transport_ports`); else the host or its daemon"
)
_SLOW: Final = "mend what it names, on both sides (`kvd doctor` there says more), and restart one of the two daemons"


def check_daemon(path: str, timeout: float) -> list[Finding]:
    """Checks the socket's mode, the daemon's answer, and its paths to peers."""
    try:
        found = os.stat(path)
    except OSError as error:
        fix = "start one (`systemctl start kvd@0`, `kvd serve`), or pass its socket with --socket"
        return [Finding("daemon", Level.NOTE, f"no socket at {path}: {error.strerror}", fix)]
    findings = [_check_mode(path, found)]
    try:
        with Inquiry(path) as inquiry:
            listener = inquiry.credentials
            status = decode(inquiry.status(timeout))
    except KvdError as error:
        fix = "if it hangs, its log and /livez say more, and systemd's watchdog restarts it"
        return [*findings, Finding("daemon", Level.BROKEN, error.text, fix)]
    if listener.pid == 0:
        text = "it runs in another PID namespace"
        findings.append(Finding("daemon", Level.NOTE, text, "run `kvd drain` in its container"))
    findings.extend(_check_sharing(path, listener))
    if status.ready:
        findings.append(Finding("daemon", Level.OK, f"{status.daemon} {status.version} is ready"))
    findings.append(check_wait(status.processor))
    if listener.pid and listener.pid == status.pid:  # else its numbers are those of another PID namespace
        findings.extend(check_groups(status.pid, status.worker_pids))
    for name, reason in sorted(status.not_ready.items()):
        findings.append(Finding("daemon", Level.BROKEN, f"not ready, {name}: {reason}", "see `kvd status` and its log"))
    findings.extend(_unreached(peer) for peer in status.handshake if peer.unreached_seconds is not None)
    findings.extend(finding for peer in status.handshake for finding in _ways(peer))
    return findings


def _ways(peer: PeerStatus) -> Iterator[Finding]:
    """How a peer is read."""
    subject, staged = f"peer {peer.daemon}", STAGED & set(peer.path.split())
    if staged or (peer.path and not peer.slow):
        yield Finding(subject, Level.NOTE if staged else Level.OK, f"{peer.path}: {how_read(peer.path)}")
    if peer.slow:
        yield Finding(subject, Level.SLOW, f"{peer.path}: {peer.slow}", _SLOW)


def _unreached(peer: PeerStatus) -> Finding:
    text = f"its memory has not been reached for {peer.unreached_seconds:.0f} s, and it was last heard "
    text += f"{peer.silent_seconds:.1f} s ago, at {peer.address}: {peer.last_loss}"
    return Finding(f"peer {peer.daemon or peer.address}", Level.BROKEN, text, _UNREACHED)


def _check_mode(path: str, found: os.stat_result) -> Finding:
    owner = _name(lambda: pwd.getpwuid(found.st_uid).pw_name, found.st_uid)
    group = _name(lambda: grp.getgrgid(found.st_gid).gr_name, found.st_gid)
    text = f"{stat.filemode(found.st_mode)} {owner}:{group}"
    if not stat.S_ISSOCK(found.st_mode):
        return Finding("socket", Level.BROKEN, f"{path} is not a socket ({text})", "set another path: KVD_SOCKET")
    if found.st_mode & stat.S_IWOTH:
        fix = "set KVD_SOCKET_MODE=0660 and add workers to the group"
        return Finding("socket", Level.NOTE, f"{text}: every user of this host may attach", fix)
    if not os.access(path, os.R_OK | os.W_OK):
        return Finding("socket", Level.BROKEN, f"{text}: this user may not connect", f"join the group {group}")
    return Finding("socket", Level.OK, text)


def _check_sharing(path: str, listener: Credentials) -> list[Finding]:
    """Looks for daemons of the same user, in the socket's folder and beside it."""
    own = os.path.realpath(path)
    folder = os.path.dirname(own)
    beside = os.path.dirname(folder)
    # Both may be folders to which everybody writes: what is odd there is passed over.
    found = [f"{folder}/{name}" for name in glob(f"*{POOLS}", root_dir=folder, include_hidden=True)]
    found += [f"{beside}/{name}" for name in glob(f"*/*{POOLS}", root_dir=beside, include_hidden=True)]
    places = {os.path.realpath(place) for place in found} - {f"{own}{POOLS}"}
    others = sorted(place for place in places if _serves(place, listener.uid))
    if not others:
        return []
    text = f"user {listener.uid} also runs the daemon at {', '.join(others)}: what a daemon lends to another of its "
    return [Finding("daemon", Level.NOTE, f"{text}user for reading, that one may write to", _SAME_USER)]


def _serves(place: str, uid: int) -> bool:
    """Whether a process of this user, in our eyes, listens there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        with contextlib.suppress(OSError):
            probe.connect(place)
            return credentials(probe).uid == uid
    return False


def _name(lookup: Callable[[], str], number: int) -> str:
    try:
        return lookup()
    except KeyError:
        return str(number)  # containers know few names
