"""Which users may attach to which pools. The kernel says which user is at the other end of a socket.

Without a policy file, only root and the user that the daemon runs as may attach; everyone else whom the socket's file
mode lets connect may request a status. A policy file, in TOML, admits more users:

    [[workers]]
    uid = 1000              # or gid = 1000, or both: then both must hold
    pools = ["prefill-*"]   # names they may attach under
    max_bytes = 68719476736 # of all pools of one user together; unbounded if left out
"""

import fnmatch
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from kvd import files, limits
from kvd.errors import ErrorCode, refusal

_Id = Annotated[int, Meta(ge=0, lt=1 << 32)]
_ROOT = 0


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What some users may do."""

    pools: Annotated[tuple[Annotated[str, Meta(max_length=limits.MAX_NAME_BYTES)], ...], Meta(min_length=1)]
    uid: _Id | None = None
    gid: _Id | None = None
    max_bytes: Annotated[int, Meta(gt=0)] | None = None

    def covers(self, uid: int, gid: int, pool: str) -> bool:
        """Whether it lets this user attach to this pool."""
        of_user = self.uid in (None, uid) and self.gid in (None, gid)
        return of_user and any(fnmatch.fnmatchcase(pool, pattern) for pattern in self.pools)


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    workers: tuple[Rule, ...]


@dataclass(frozen=True, slots=True)
class Policy:
    """`owner` is the user that the daemon runs as. The first rule that covers a worker applies."""

    owner: int
    rules: Sequence[Rule] = ()

    def is_privileged(self, uid: int) -> bool:
        """Whether this is root or the daemon's own user, for whom room is kept."""
        return uid in (self.owner, _ROOT)

    def may_attach(self, uid: int, gid: int) -> bool:
        """Whether this user may attach under some name."""
        return self.is_privileged(uid) or any(
            rule.uid in (None, uid) and rule.gid in (None, gid) for rule in self.rules
        )

    def permit(self, uid: int, gid: int, pool: str) -> int | None:
        """The bytes that all pools of this user may have together, None if unbounded.

        Raises:
            BadRequest: `NOT_PERMITTED`, this user may not attach under this name.

        """
        for rule in self.rules:
            if rule.covers(uid, gid, pool):
                return rule.max_bytes
        if self.is_privileged(uid):
            return None
        text = (
            f"user {uid} (group {gid}) may not attach as {pool!r}: run it as user {self.owner}, or add a rule for it "
            "to the daemon's `worker_policy`; a status request needs no rule"
        )
        raise refusal(ErrorCode.NOT_PERMITTED, text)


def load(path: Path) -> tuple[Rule, ...]:
    """The rules in a file.

    Raises:
        BadRequest: `BAD_CONFIG`, the file cannot be read, others own it or may write to it, or a rule is not valid.

    """
    text, status = files.read(path, limits.MAX_CONFIG_BYTES)
    files.check_writers(path, status, "admit themselves")
    try:
        rules = msgspec.convert(tomllib.loads(text), _File).workers
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise refusal(ErrorCode.BAD_CONFIG, f"{path}: {error}") from error
    if any(rule.uid is None and rule.gid is None for rule in rules):
        raise refusal(ErrorCode.BAD_CONFIG, f"{path}: a rule without uid and gid would let everybody in; add one")
    return rules
