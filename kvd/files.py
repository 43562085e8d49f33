"""Files that say who may do what: a file that another user could have written is as good as that user's word."""

import os
import stat
from pathlib import Path

from kvd.errors import ErrorCode, refusal


def read(path: Path, bound: int) -> tuple[str, os.stat_result]:
    """The text of a file of at most `bound` bytes, and the status of the very file that was read.

    Raises:
        BadRequest: `BAD_CONFIG`, it cannot be read, has more bytes, or is no text.

    """
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            content = file.read(bound + 1)
            if len(content) > bound:
                raise refusal(ErrorCode.BAD_CONFIG, f"{path} has more than {bound} bytes; is it the right file?")
            return content.decode(), status
    except OSError as error:
        raise refusal(ErrorCode.BAD_CONFIG, f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise refusal(ErrorCode.BAD_CONFIG, f"{path} is not UTF-8 text") from error


def check_owner(path: Path, status: os.stat_result, danger: str) -> None:
    """Checks that the file is this process's user's, or root's. `danger` says what its owner could do.

    Raises:
        BadRequest: `BAD_CONFIG`, it is another user's.

    """
    if status.st_uid not in (os.geteuid(), 0):
        text = f"{path} belongs to user {status.st_uid}, who could {danger}; run `chown {os.geteuid()} {path}`"
        raise refusal(ErrorCode.BAD_CONFIG, text)


def check_writers(path: Path, status: os.stat_result, danger: str) -> None:
    """Checks that nobody but this process's user and root may write to the file. `danger` says what others could do.

    Raises:
        BadRequest: `BAD_CONFIG`, others may.

    """
    check_owner(path, status, danger)
    mode = stat.S_IMODE(status.st_mode)
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        text = f"{path} has mode {mode:04o}: others could {danger}; run `chmod go-w {path}`"
        raise refusal(ErrorCode.BAD_CONFIG, text)
