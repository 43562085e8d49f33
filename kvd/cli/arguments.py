"""Types of flags that several commands have."""

import argparse

from kvd import limits


def seconds(text: str) -> float:
    """A time that can be waited for. argparse names the flag and the value where it cannot."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= limits.MAX_COMMAND_SECONDS:  # not a number (NaN) is in no range either
        raise argparse.ArgumentTypeError(f"{text!r} must be from 0 to {limits.MAX_COMMAND_SECONDS:g} seconds")
    return value
