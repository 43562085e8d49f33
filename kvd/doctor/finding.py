"""What a check says."""

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How well it is."""

    OK = "ok"
    NOTE = "note"
    """nothing is wrong, but somebody may have expected otherwise"""
    SLOW = "slow"
    """it works, slower than it could"""
    BROKEN = "broken"
    """it does not work"""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `fix` is what to do, empty where nothing needs doing."""

    subject: str
    level: Level
    text: str
    fix: str = ""
