"""CURVE keys: a daemon's own pair, in a file that only it may read, and the allow-list of its peers.

Keys are written as 64 hexadecimal digits. A key file has two lines, `public = ...` and `secret = ...`. An allow-list
has a line `<public key> <name> [pool ...]` for each daemon, with its configured name. A name that ends in `*` covers
all names with that prefix, for replicas that share a key and have generated names, such as pods; the most specific line
that covers a name is the only one that counts for it. If names of pools or patterns (`prefill.*`) follow, the daemon
may read only these. Empty lines and `#` comments are skipped.
"""

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import zmq
from zmq.utils import z85

from kvd import files, limits
from kvd.errors import ErrorCode, refusal
from kvd.net.interface import EVERY_POOL

KEY_BYTES: Final = 32
MAX_KEY_FILE_BYTES: Final = 4096
MAX_ALLOWED_BYTES: Final = 256 * limits.MAX_PEERS
_HEX_KEY: Final = re.compile(r"[0-9a-f]{64}")
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}\*?")


class Allowed(NamedTuple):
    """A daemon on the allow-list, and name patterns of the pools that it may read."""

    name: str
    pools: tuple[str, ...] = EVERY_POOL


@dataclass(frozen=True, slots=True)
class KeyPair:
    """The keys of one daemon, 32 bytes each."""

    public: bytes
    secret: bytes

    def __repr__(self) -> str:
        return f"KeyPair(public={self.public.hex()})"


def generate() -> KeyPair:
    """A new pair."""
    public, secret = zmq.curve_keypair()
    return KeyPair(z85.decode(public), z85.decode(secret))


def save(pair: KeyPair, path: Path) -> None:
    """Writes a key file with mode 0600.

    Raises:
        BadRequest: `BAD_CONFIG`, the file exists or cannot be written.

    """
    text = f"# A secret of this daemon: it never leaves this host.\npublic = {pair.public.hex()}\n"
    temporary = path.parent / f".kvd-key-{os.urandom(8).hex()}"
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(descriptor, "w") as file:
                os.fchmod(descriptor, 0o600)
                file.write(f"{text}secret = {pair.secret.hex()}\n")
                file.flush()
                os.fsync(descriptor)
            os.link(temporary, path)  # under its name it is there whole, or not at all
        finally:
            os.unlink(temporary)
    except FileExistsError as error:
        text = f"{path} exists; a new key would shut out every peer that allows the old one. Move it away first"
        raise refusal(ErrorCode.BAD_CONFIG, text) from error
    except OSError as error:
        raise refusal(ErrorCode.BAD_CONFIG, f"cannot write {path}: {error.strerror}") from error


def load(path: Path) -> KeyPair:
    """Reads a key file.

    Raises:
        BadRequest: `BAD_CONFIG`, it is missing, another user's, readable by others, or not a key file of
            `kvd keys generate`.

    """
    text, status = files.read(path, MAX_KEY_FILE_BYTES)
    files.check_owner(path, status, "read the secret key, or give this daemon another one")
    mode = stat.S_IMODE(status.st_mode)
    # Secrets of Kubernetes and systemd belong to root and are readable by the daemon's group.
    lent = status.st_uid == 0 and os.geteuid() != 0
    if mode & (0o037 if lent else 0o077):
        text = f"{path} has mode {mode:04o}: others may read the secret key; run `chmod 600 {path}`"
        raise refusal(ErrorCode.BAD_CONFIG, text)
    fields = dict(re.findall(r"^(public|secret) = ([0-9a-f]{64})$", text, re.MULTILINE))
    if fields.keys() != {"public", "secret"}:
        raise refusal(ErrorCode.BAD_CONFIG, f"{path} is no key file; make one with `kvd keys generate`")
    pair = KeyPair(bytes.fromhex(fields["public"]), bytes.fromhex(fields["secret"]))
    if z85.decode(zmq.curve_public(z85.encode(pair.secret))) != pair.public:
        raise refusal(ErrorCode.BAD_CONFIG, f"{path}: the public key is not that of the secret one; make a new file")
    return pair


def load_allowed(path: Path) -> dict[bytes, Allowed]:
    """Reads an allow-list into daemons by public key.

    Raises:
        BadRequest: `BAD_CONFIG`, others own the file or may write to it, or a line (named) is malformed or repeats a
            key or name.

    """
    allowed: dict[bytes, Allowed] = {}
    names: set[str] = set()
    text, status = files.read(path, MAX_ALLOWED_BYTES)
    files.check_writers(path, status, "add their keys")
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) < 2 or not _HEX_KEY.fullmatch(words[0]) or not _NAME.fullmatch(words[1]):
            wrong = f"{path}, line {number}: {line[:100]!r} is not `<64 hexadecimal digits> <name> [pool ...]`"
            raise refusal(ErrorCode.BAD_CONFIG, f"{wrong}; `kvd keys show` prints such a line")
        key, name = bytes.fromhex(words[0]), words[1]
        if key in allowed or name in names:
            raise refusal(ErrorCode.BAD_CONFIG, f"{path}, line {number}: key or name {name!r} is there already")
        allowed[key] = Allowed(name, tuple(words[2:]) or EVERY_POOL)
        names.add(name)
    return allowed


def check_name(name: str) -> None:
    """Checks that a line of an allow-list may give this name to a daemon.

    Raises:
        BadRequest: `BAD_CONFIG`, it may not.

    """
    if not _NAME.fullmatch(name):
        text = "must be 1 to 64 letters, digits, dots, underscores and hyphens; a * may follow for all that begin so"
        raise refusal(ErrorCode.BAD_CONFIG, f"the name {name!r} {text}")


def covers(pattern: str, name: str) -> bool:
    """Whether an allow-list's name or pattern covers `name`."""
    return name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern
