"""Files that say who may do what: a file that another user could have written is as good as that user's word."""

import os
import stat
import tomllib
from pathlib import Path
from typing import Any

from kvd.errors import ErrorCode, refusal


def read(path: Path, bound: int) -> tuple[str, os.stat_result]:
    """The text of a file of at most `bound` bytes, and the status of the very file that was read.

    Raises:
        BadRequest: `BAD_CONFIG`, it cannot be read, is no regular file, has more bytes, or is no text.

    """
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise refusal(ErrorCode.BAD_CONFIG, f"{path} is no regular file")
            content = file.read(bound + 1)
            if len(content) > bound:
                raise refusal(ErrorCode.BAD_CONFIG, f"{path} has more than {bound} bytes; is it the right file?")
            return content.decode(), status
    except OSError as error:
        raise refusal(ErrorCode.BAD_CONFIG, f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise refusal(ErrorCode.BAD_CONFIG, f"{path} is not UTF-8 text") from error
    except ValueError as error:  # the path has a zero byte
        raise refusal(ErrorCode.BAD_CONFIG, f"cannot read {str(path)!r}: {error}") from error


def _without_waiting(path: str, flags: int) -> int:
    """Opens a FIFO at once, too: to wait for who writes to it would stop the daemon."""
    return os.open(path, flags | os.O_NONBLOCK)


def parse_toml(path: Path, text: str) -> dict[str, Any]:
    """What the TOML in `text`, which was read from `path`, says.

    Raises:
        BadRequest: `BAD_CONFIG`, it is no TOML, or has more levels or longer numbers than Python's parser takes.

    """
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise refusal(ErrorCode.BAD_CONFIG, f"{path}: {error}") from error


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
