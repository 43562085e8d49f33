"""Allows one daemon per socket path, by a lock that the kernel drops when its holder dies."""

import fcntl
import os
import stat

from kvd.errors import BadRequest, ErrorCode


class PathLock:
    """Holds `path` + `.lock` for this process, until `release` or death.

    Raises:
        BadRequest: `BAD_CONFIG`, another process holds it, `path` exists and is no socket, or the folder or the lock's
            file belongs to another user, who could redirect us or serve in our place.

    """

    def __init__(self, path: str) -> None:
        self._path = f"{path}.lock"
        try:
            _refuse_foreign(os.path.dirname(path) or ".")
        except OSError as error:
            raise BadRequest(ErrorCode.BAD_CONFIG, f"cannot make {self._path}: {error}") from error
        self._descriptor = self._acquire(path)
        try:
            _refuse_other_files(path)
        except BadRequest:
            self.release()
            raise

    def release(self) -> None:
        """Removes the lock's file and drops it; a second call does nothing."""
        if self._descriptor >= 0:
            os.unlink(self._path)
            os.close(self._descriptor)
            self._descriptor = -1

    def _acquire(self, path: str) -> int:
        while True:
            try:
                descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            except OSError as error:
                raise BadRequest(ErrorCode.BAD_CONFIG, f"cannot make {self._path}: {error}") from error
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The last holder may have removed the file between our opening and locking it.
                if _same_file(descriptor, self._path):
                    _refuse_foreign(descriptor)
                    return descriptor
            except BadRequest:
                os.close(descriptor)
                raise
            except BlockingIOError as error:
                os.close(descriptor)
                raise BadRequest(
                    ErrorCode.BAD_CONFIG, f"another kvd serves {path}: stop it, or choose another socket path"
                ) from error
            os.close(descriptor)


def _same_file(descriptor: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


def _refuse_foreign(path: str | int) -> None:
    owner = os.stat(path).st_uid
    if owner not in (os.geteuid(), 0):
        what = f"the folder {path}" if isinstance(path, str) else "the lock's file"
        text = f"{what} belongs to user {owner}; put the socket into a folder of user {os.geteuid()} or root's"
        raise BadRequest(ErrorCode.BAD_CONFIG, text)


def _refuse_other_files(path: str) -> None:
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise BadRequest(ErrorCode.BAD_CONFIG, f"{path} exists and is no socket: choose another socket path")
