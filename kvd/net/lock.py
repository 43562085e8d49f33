"""Allows one daemon per socket path, by a lock that the kernel drops when its holder dies."""

import contextlib
import fcntl
import os
import stat
import time
from dataclasses import dataclass
from typing import Final

from kvd.errors import BadRequest, ErrorCode, refusal
from kvd.net.unix import is_trusted
from kvd.protocol.address import LOCK

_MOMENT_SECONDS: Final = 0.1
_AGAIN_SECONDS: Final = 0.001
"""How long a lock may be taken by those that only look whether it is (`Lock.taken`), and how often to try it then."""


class PathLock:
    """Holds `path` + `.lock` for this process, until `release` or death.

    Raises:
        BadRequest: `BAD_CONFIG`, another process holds it, `path` exists and is no socket, or `path`, its folder or the
            lock's file belongs to another user, who could redirect us or serve in our place.

    """

    def __init__(self, path: str) -> None:
        self._path = path + LOCK
        folder = os.path.dirname(path) or "."
        try:
            _refuse_foreign(f"the folder {folder}", os.stat(folder).st_uid)
        except OSError as error:
            raise refusal(ErrorCode.BAD_CONFIG, f"cannot make {self._path}: {error}") from error
        self._descriptor = self._acquire(path)
        try:
            _refuse_other_files(path)
        except BadRequest:
            self.release()
            raise

    @property
    def descriptor(self) -> int:
        """The lock is held until all duplicates of this are closed, too."""
        return self._descriptor

    def release(self, *sockets: str) -> None:
        """Removes these sockets and the lock's file, and drops the lock; a second call does nothing.

        If the lock's file is another one by now, somebody has removed ours and another daemon serves here: then all
        stays as it is. What cannot be removed is replaced by whoever serves here next.
        """
        if self._descriptor < 0:
            return
        if _same_file(self._descriptor, self._path) or not os.path.lexists(self._path):
            for path in (*sockets, self._path):
                with contextlib.suppress(OSError):
                    os.unlink(path)
        os.close(self._descriptor)
        self._descriptor = -1

    def _acquire(self, path: str) -> int:
        deadline = time.monotonic() + _MOMENT_SECONDS
        while True:
            try:
                with contextlib.suppress(FileNotFoundError):
                    # Before the kernel refuses to open it, or shows that its owner has locked it.
                    _refuse_foreign(self._path, os.lstat(self._path).st_uid)
                descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            except OSError as error:
                raise refusal(ErrorCode.BAD_CONFIG, f"cannot make {self._path}: {error}") from error
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The last holder may have removed the file between our opening and locking it.
                if _same_file(descriptor, self._path):
                    _refuse_foreign(self._path, os.fstat(descriptor).st_uid)
                    return descriptor
            except BadRequest:
                os.close(descriptor)
                raise
            except BlockingIOError as error:
                os.close(descriptor)
                if time.monotonic() < deadline:
                    time.sleep(_AGAIN_SECONDS)
                    continue
                raise refusal(
                    ErrorCode.BAD_CONFIG, f"another kvd serves {path}: stop it, or choose another socket path"
                ) from error
            except OSError as error:
                os.close(descriptor)
                text = f"cannot lock {self._path}: {error.strerror}; put the socket on a file system that has locks"
                raise refusal(ErrorCode.BAD_CONFIG, text) from error
            os.close(descriptor)


@dataclass(frozen=True, slots=True)
class Lock:
    """The lock of the socket at `path`, seen from outside (a `kvd.holders.Place`)."""

    path: str

    @property
    def name(self) -> str:
        """For people."""
        return f"the socket {self.path}"

    def taken(self) -> bool:
        """Whether a process of a user that may have it holds it."""
        try:
            if not is_trusted(os.lstat(self.path + LOCK).st_uid):
                return False  # `PathLock` refuses it, however long one waits
            descriptor = os.open(self.path + LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # there are no locks, as `PathLock` says
            return False
        finally:
            os.close(descriptor)
        return False

    def links(self) -> set[str]:
        """The lock's file."""
        return {os.path.realpath(self.path) + LOCK}


def _refuse_other_files(path: str) -> None:
    """Checks that nothing is at `path`, or a socket that we may replace.

    Raises:
        BadRequest: `BAD_CONFIG`, it is no socket, or another user's.

    """
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise refusal(ErrorCode.BAD_CONFIG, f"{path} exists and is no socket: choose another socket path")
    _refuse_foreign(path, found.st_uid)


def _same_file(descriptor: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


def _refuse_foreign(what: str, owner: int) -> None:
    if not is_trusted(owner):
        text = f"{what} belongs to user {owner}: remove it, or put the socket into a folder of user {os.geteuid()} or "
        raise refusal(ErrorCode.BAD_CONFIG, f"{text}root's to which {owner} may not write")
