"""The checks of `kvd doctor`, a file for each subject; every bad finding names its fix."""

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How good or bad a finding is."""

    OK = "ok"
    NOTE = "note"
    """nothing is wrong, but it may surprise"""
    SLOW = "slow"
    """it works, slower than it could"""
    BROKEN = "broken"
    """it does not work"""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `fix` says what to do; empty if nothing."""

    subject: str
    level: Level
    text: str
    fix: str = ""
