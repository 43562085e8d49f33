"""Addresses of peers, as configurations and tickets give them, and who listens there."""

import errno
import os
import re

from kvd import foreign
from kvd.errors import ErrorCode, refusal
from kvd.net.local.listener import connect_to, hang_up
from kvd.net.stream import no_descriptor
from kvd.net.unix import MAX_PATH_BYTES, credentials
from kvd.protocol.address import LAST_PORT, PEERS

_ADDRESS = re.compile(
    r"(?P<place>tcp://(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):(?P<port>\d{1,5})"
    rf"|ipc://(?P<path>/[^#\s\0]+{re.escape(PEERS)}))"
    r"(#(?P<key>[0-9a-f]{64}))?"
)


def check_own(address: str) -> re.Match[str]:
    """The parts of our own address: `place`, and `host` and `port` or `path`.

    Raises:
        BadRequest: `BAD_CONFIG`, it is malformed, or has a key.

    """
    match = check_address(address, ErrorCode.BAD_CONFIG)
    if match["key"] is not None:
        raise refusal(ErrorCode.BAD_CONFIG, f"{address!r}: the key is that of `curve_key`; leave it out")
    return match


def check_user(path: str) -> None:
    """Refuses a path that leads elsewhere, or where another user listens; if nobody does yet, connections are checked.

    Raises:
        BadRequest: `NOT_PERMITTED`, another user does, or the socket was bound under another name.
        Unavailable: `OVERLOADED`, no descriptor is left to find out, or too many of that user's are yet to be closed.

    """
    user, name = -1, path
    try:
        foreign.check(os.stat(path).st_uid)
        probe = connect_to(path)
    except PermissionError:
        pass
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise no_descriptor(error) from error
        return
    else:
        user, name = credentials(probe).uid, probe.getpeername()
        hang_up(probe)
    if user != os.geteuid():
        who = f"as user {user}" if user >= 0 else "as another user"
        raise refusal(
            ErrorCode.NOT_PERMITTED,
            f"the daemon at {path} runs {who}, this one as user {os.geteuid()}, and a Unix socket joins daemons of "
            "one user; run both as one, or give both `curve_key` and `curve_peers`",
        )
    if name != path:
        raise refusal(ErrorCode.NOT_PERMITTED, f"{path} leads to the socket of the daemon at {name}: name that")


def check_address(address: str, code: ErrorCode) -> re.Match[str]:
    """The parts of an address, and its `key`.

    Raises:
        BadRequest: `code`, it is malformed.

    """
    match = _ADDRESS.fullmatch(address)
    if match is None or int(match["port"] or 0) > LAST_PORT:
        raise refusal(code, f"address {address[:200]!r} is not tcp://host:port, nor ipc:///path{PEERS}")
    path = match["path"]
    if path is not None and (os.path.normpath(path) != path or len(os.fsencode(path)) > MAX_PATH_BYTES):
        raise refusal(
            code, f"path {path[:200]!r} of a Unix socket is not the shortest spelling, or above {MAX_PATH_BYTES} bytes"
        )
    return match
