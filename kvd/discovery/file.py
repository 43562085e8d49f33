"""The peer file: daemons to connect to in advance, so that the first transfer does not wait for a handshake.

It has a line `<name> <address>` for each; empty lines and what follows a `#` after a space are skipped. With CURVE an
address may omit its key: it is the allow-list's for that name. The file is checked every second. It decides whom the
daemon connects to, never whom it trusts.
"""

import re
from pathlib import Path
from typing import Final

from kvd import limits
from kvd.discovery.reach import check_mutual
from kvd.errors import ErrorCode, refusal
from kvd.net.trust import Trust
from kvd.protocol.address import is_everywhere

_COMMENT: Final = re.compile(r"(^|\s)#.*")


class PeersFile:
    """Reads `path`; `own` is the address at which peers reach this daemon, called `name`."""

    def __init__(self, path: Path, name: str, own: str, trust: Trust | None) -> None:
        self._path = path
        self._name = name
        self._own = own
        self._trust = trust
        self._seen = self._look()

    def read(self) -> frozenset[str]:
        """The addresses in the file, without this daemon's.

        Raises:
            BadRequest: `BAD_CONFIG`, naming the wrong line, or the daemon that could not reach this one.

        """
        try:
            lines = self._path.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise refusal(ErrorCode.BAD_CONFIG, f"cannot read {self._path}: {error}") from error
        if len(lines) > 2 * limits.MAX_PEERS:
            raise refusal(ErrorCode.BAD_CONFIG, f"{self._path} has {len(lines)} lines; {limits.MAX_PEERS} may be met")
        found = (self._address(number, _COMMENT.sub("", line)) for number, line in enumerate(lines, 1))
        addresses = frozenset(address for address in found if address)
        check_mutual(self._own, addresses)
        return addresses

    def changed(self) -> bool:
        """Whether the file changed since the last call; a missing file counts as unchanged."""
        before, now = self._seen, self._look()
        self._seen = now or before
        return self._seen != before

    def _look(self) -> tuple[int, int, int] | None:
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns, status.st_size

    def _address(self, number: int, line: str) -> str | None:
        words = line.split()
        if not words:
            return None
        if len(words) != 2 or not words[1].startswith(("tcp://", "ipc:///")) or is_everywhere(words[1]):
            text = f"{self._path}, line {number}: {line[:100]!r} is not `<name> tcp://host:port`, nor `ipc:///path`"
            raise refusal(ErrorCode.BAD_CONFIG, text)
        name, address = words
        if name == self._name:
            return None
        if self._trust is None or "#" in address:
            return address
        key = self._trust.key_of(name)
        if key is None:
            text = f"{self._path}, line {number}: {name!r} is not on the allow-list, and its address names no key"
            raise refusal(ErrorCode.BAD_CONFIG, text)
        return f"{address}#{key.hex()}"
