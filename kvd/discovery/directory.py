"""The list of daemons to connect to: the peer file and DNS together, watched for changes."""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from kvd.discovery.file import PeersFile
from kvd.errors import KvdError

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
