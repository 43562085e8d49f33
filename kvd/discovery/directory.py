"""The list of daemons to connect to: the peer file and DNS together, watched for changes.

The peer file has a line `<name> <address>` for each; empty lines and what follows a `#` after a space are skipped. With
CURVE an address may omit its key: it is the allow-list's for that name. The file is checked every second. It decides
whom the daemon connects to, never whom it trusts.
"""

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvd import files, limits
from kvd.errors import ErrorCode, KvdError, refusal
from kvd.host import without_links
from kvd.net.trust import Trust
from kvd.protocol.address import check_mutual, is_everywhere

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
        lines = files.read(self._path, limits.MAX_PEERS_FILE_BYTES)[0].splitlines()
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
        except (OSError, ValueError):  # `read` says what is wrong
            return None
        return status.st_ino, status.st_mtime_ns, status.st_size

    def _address(self, number: int, line: str) -> str | None:
        words = line.split()
        if not words:
            return None
        known = len(words) == 2 and words[1].startswith(("tcp://", "ipc:///")) and "\0" not in line
        if not known or is_everywhere(words[1]):
            text = f"{self._path}, line {number}: {line[:100]!r} is not `<name> tcp://host:port`, nor `ipc:///path`"
            raise refusal(ErrorCode.BAD_CONFIG, text)
        name, address = words[0], without_links(words[1])
        if name == self._name:
            return None
        if self._trust is None or "#" in address:
            return address
        key = self._trust.key_of(name)
        if key is None:
            text = f"{self._path}, line {number}: {name!r} is not on the allow-list, and its address names no key"
            raise refusal(ErrorCode.BAD_CONFIG, text)
        return f"{address}#{key.hex()}"


if TYPE_CHECKING:
    from kvd.discovery.names import PeerNames

FILE_SECONDS: Final = 1.0
"""Between checks of the file for changes."""
RETRY_SECONDS: Final = 5.0
"""Between a look-up that failed and the next."""


class Directory:
    """Calls `tell` with all addresses whenever they change. `log` is a structlog logger.

    Raises:
        BadRequest: `BAD_CONFIG`, the file is wrong when the daemon starts.

    """

    def __init__(
        self, file: PeersFile | None, names: "PeerNames | None", tell: Callable[[frozenset[str]], None], log: Any
    ) -> None:
        self._file, self._names, self._tell, self._log = file, names, tell, log
        self._in_file = file.read() if file else frozenset()
        self._in_dns: frozenset[str] = frozenset()
        self._strangers: frozenset[str] = frozenset()
        self._last_trouble = ""
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begins to watch, on the running loop."""
        if self._file is not None:
            self._say()
            self._tasks.append(asyncio.ensure_future(self._watch_file(self._file)))
        if self._names is not None:
            self._tasks.append(asyncio.ensure_future(self._watch_names(self._names)))

    def stop(self) -> None:
        """Stops watching."""
        for task in self._tasks:
            task.cancel()

    def refresh(self) -> None:
        """Reads the file again even if unchanged: the allow-list may have new keys for it."""
        if self._file is not None:
            self._read(self._file)

    def _read(self, file: PeersFile) -> None:
        try:
            self._in_file = file.read()
        except KvdError as error:
            self._log.error("the expected peers stay as they were", reason=error.text)
        else:
            self._say()

    async def _watch_file(self, file: PeersFile) -> None:
        while True:
            await asyncio.sleep(FILE_SECONDS)
            if file.changed():
                self._read(file)

    async def _watch_names(self, names: "PeerNames") -> None:
        while True:
            seconds = RETRY_SECONDS
            try:
                found = await names.look_up()
            except KvdError as error:
                if error.text != self._last_trouble:
                    self._log.error("the expected peers stay as they were", reason=error.text)
                self._last_trouble = error.text
            else:
                seconds, self._last_trouble = found.holds, ""
                for stranger in sorted(found.strangers - self._strangers):
                    self._log.warning("expected peer is not on the allow-list", peer=stranger)
                self._strangers = found.strangers
                if found.addresses != self._in_dns:
                    self._in_dns = found.addresses
                    self._say()
            await asyncio.sleep(seconds)

    def _say(self) -> None:
        addresses = self._in_file | self._in_dns
        self._tell(addresses)
        self._log.info("peers expected", peers=len(addresses))
