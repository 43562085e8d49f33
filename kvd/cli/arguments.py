"""Types of flags that several commands have. argparse names the flag and the value that one of them refuses."""

import argparse
import importlib
import os
import stat
from collections.abc import Callable
from pathlib import Path

from kvd import limits


def seconds(text: str) -> float:
    """A time that can be waited for."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= limits.MAX_COMMAND_SECONDS:  # not a number (NaN) is in no range either
        raise argparse.ArgumentTypeError(f"{text!r} must be from 0 to {limits.MAX_COMMAND_SECONDS:g} seconds")
    return value


def positive_seconds(text: str) -> float:
    """A time in which something can happen."""
    value = seconds(text)
    if value == 0:
        raise argparse.ArgumentTypeError(f"{text!r} must be above 0 seconds")
    return value


def at_least(least: int) -> Callable[[str], int]:
    """A whole number that is not below `least`."""

    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value}: must be {least} or more")
        return value

    return number


def output_file(text: str) -> Path:
    """A file that can be written, of what may take minutes until it is. Its folder is made if there is none."""
    path = Path(text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: its folder cannot be made: {error.strerror}") from error
    try:
        can_be = not stat.S_ISDIR(path.stat().st_mode) and os.access(path, os.W_OK)
    except FileNotFoundError:
        can_be = os.access(path.parent, os.W_OK)
    except OSError as error:  # its folder cannot be searched, or no name is so long
        raise argparse.ArgumentTypeError(f"{text!r}: cannot be written: {error.strerror}") from error
    if not can_be:
        raise argparse.ArgumentTypeError(f"{text!r}: cannot be written")
    return path


def picture(text: str) -> Path:
    """An `output_file` that can be drawn.

    Raises:
        ModuleNotFoundError: matplotlib is not installed (it comes with the extra `plot`).

    """
    importlib.import_module("matplotlib")
    return output_file(text)
