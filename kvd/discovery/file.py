"""The peer file: daemons to meet ahead of the first transfer, so that it does not wait for a handshake.

A line for each, `<name> <address>`; empty lines and what follows a `#` after a space are skipped. With CURVE an
address may leave its key out: it is the one that the allow-list has for the name. The file is looked at every second,
and may be written by whoever knows the fleet: it decides whom we connect to, never whom we trust.
"""

import re
from pathlib import Path
from typing import Final

from kvd import limits
from kvd.discovery.reach import check_mutual
from kvd.errors import BadRequest, ErrorCode
from kvd.net.trust import Trust
from kvd.protocol.address import is_everywhere

_COMMENT: Final = re.compile(r"(^|\s)#.*")


class PeersFile:
    """Reads `path`; `own` is where peers reach us."""

    def __init__(self, path: Path, name: str, own: str, trust: Trust | None) -> None:
        self._path = path
        self._name = name
        self._own = own
        self._trust = trust
        self._seen = self._look()

    def read(self) -> frozenset[str]:
        """The addresses in it, without our own.

        Raises:
            BadRequest: `BAD_CONFIG`, naming the line that is wrong, or that we cannot be reached by who is in it.

        """
        try:
            lines = self._path.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise BadRequest(ErrorCode.BAD_CONFIG, f"cannot read {self._path}: {error}") from error
        if len(lines) > 2 * limits.MAX_PEERS:
            raise BadRequest(
                ErrorCode.BAD_CONFIG, f"{self._path} has {len(lines)} lines; {limits.MAX_PEERS} may be met"
            )
        found = (self._address(number, _COMMENT.sub("", line)) for number, line in enumerate(lines, 1))
        addresses = frozenset(address for address in found if address)
        check_mutual(self._own, addresses)
        return addresses

    def changed(self) -> bool:
        """Whether the file is another than at the last call; one that is missing counts as the one before."""
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
            raise BadRequest(ErrorCode.BAD_CONFIG, text)
        name, address = words
        if name == self._name:
            return None
        if self._trust is None or "#" in address:
            return address
        key = self._trust.key_of(name)
        if key is None:
            text = f"{self._path}, line {number}: {name!r} is not on the allow-list, and its address names no key"
            raise BadRequest(ErrorCode.BAD_CONFIG, text)
        return f"{address}#{key.hex()}"
