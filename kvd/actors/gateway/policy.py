"""Which users may attach to which pools: rules over what the kernel says of the process at the other end.

Without a file, the user that the daemon runs as and root may attach; everybody else whom the sockets' file mode lets
connect may ask for a status. A file gives more users their part. It is TOML:

    [[workers]]
    uid = 1000              # or gid = 1000, or both: then both must hold
    pools = ["prefill-*"]   # names they may attach under
    max_bytes = 68719476736 # of all pools of one user together; no bound where it is left out
"""

import fnmatch
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from kvd import limits
from kvd.errors import BadRequest, ErrorCode

_Id = Annotated[int, Meta(ge=0, lt=1 << 32)]
_ROOT = 0


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whom it is about, and what they may."""

    pools: Annotated[tuple[Annotated[str, Meta(max_length=limits.MAX_NAME_BYTES)], ...], Meta(min_length=1)]
    uid: _Id | None = None
    gid: _Id | None = None
    max_bytes: Annotated[int, Meta(gt=0)] | None = None

    def covers(self, uid: int, gid: int, pool: str) -> bool:
        """Whether it is about this user and this pool."""
        of_user = self.uid in (None, uid) and self.gid in (None, gid)
        return of_user and any(fnmatch.fnmatchcase(pool, pattern) for pattern in self.pools)


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    workers: tuple[Rule, ...]


@dataclass(frozen=True, slots=True)
class Policy:
    """`owner` is the user that the daemon runs as. The first rule that covers a worker holds."""

    owner: int
    rules: Sequence[Rule] = ()

    def is_favoured(self, uid: int) -> bool:
        """Whether room is kept for this user: the daemon's own, and root."""
        return uid in (self.owner, _ROOT)

    def permit(self, uid: int, gid: int, pool: str) -> int | None:
        """The bytes that all pools of this user may have together, None without a bound.

        Raises:
            BadRequest: `NOT_PERMITTED`, this user may not attach under this name.

        """
        for rule in self.rules:
            if rule.covers(uid, gid, pool):
                return rule.max_bytes
        if self.is_favoured(uid):
            return None
        text = (
            f"user {uid} (group {gid}) may not attach as {pool!r}: run it as user {self.owner}, or add a rule for it "
            "to the daemon's `worker_policy`; asking for a status needs no rule"
        )
        raise BadRequest(ErrorCode.NOT_PERMITTED, text)


def load(path: Path) -> tuple[Rule, ...]:
    """The rules in a file.

    Raises:
        BadRequest: `BAD_CONFIG`, it cannot be read, others may write to it, or a rule is none.

    """
    try:
        content = path.read_text()
        mode = path.stat().st_mode
        rules = msgspec.convert(tomllib.loads(content), _File).workers
    except OSError as error:
        raise BadRequest(ErrorCode.BAD_CONFIG, f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise BadRequest(ErrorCode.BAD_CONFIG, f"{path}: {error}") from error
    if mode & 0o022:
        text = f"{path} has mode {mode & 0o777:04o}: others could give themselves pools; run `chmod go-w {path}`"
        raise BadRequest(ErrorCode.BAD_CONFIG, text)
    if any(rule.uid is None and rule.gid is None for rule in rules):
        raise BadRequest(ErrorCode.BAD_CONFIG, f"{path}: a rule names neither uid nor gid; it would let everybody in")
    return rules
