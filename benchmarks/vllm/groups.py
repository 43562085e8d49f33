"""What the kernel weighs a daemon as, beside its engine: a session, or a control group."""

import contextlib
import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvd.errors import BadRequest, ErrorCode
from tests.vllm.testbed.pair import KvdPair

GROUPS: Final = ("session", "cgroup", "shared")
"""Daemons and engines have a session each, as they always do; a control group each, as units and containers have; or a
daemon and its engine share one."""

_ROOT: Final = Path("/sys/fs/cgroup")
_EMPTY_SECONDS: Final = 10.0
"""For processes that an engine has started to end, after it has."""


def place(kind: str, pair: KvdPair, stack: contextlib.ExitStack, root: Path = _ROOT) -> None:
    """Has the pair's processes started in groups of this kind, which `stack` removes when all have ended.

    Raises:
        BadRequest: `BAD_CONFIG`, this host or this user may make no control groups with a weight.

    """
    if kind == "session":
        return
    prefix = f"kvd-{os.getpid()}-{pair.folder.name}"
    for daemon, server in ((pair.daemons["prefill"], pair.prefill), (pair.daemons["decode"], pair.decode)):
        daemon.within = stack.enter_context(control_group(f"{prefix}-{daemon.name}", root))
        if kind == "shared":
            server.within = daemon.within
        else:
            server.within = stack.enter_context(control_group(f"{prefix}-{server.name}", root))


@contextlib.contextmanager
def control_group(name: str, root: Path = _ROOT) -> Iterator[tuple[str, ...]]:
    """A control group of the usual weight, at the top; what is yielded starts a command in it.

    Raises:
        BadRequest: `BAD_CONFIG`, there can be none.

    """
    top = root / "cpu" if (root / "cpu").is_dir() else root  # version 1, or 2
    folder = top / name
    try:
        folder.mkdir()
    except OSError as error:
        text = f"--groups: cannot make the control group {folder}: {error.strerror}; run as root, or leave it out"
        raise BadRequest(ErrorCode.BAD_CONFIG, text) from error
    try:
        if not any((folder / file).exists() for file in ("cpu.shares", "cpu.weight")):
            text = f"--groups: control groups in {top} have no weight: echo +cpu > {top}/cgroup.subtree_control"
            raise BadRequest(ErrorCode.BAD_CONFIG, text)
        yield "sh", "-c", f'echo $$ > "{folder}/cgroup.procs" && exec "$@"', "sh"
    finally:
        _remove(folder)


def _remove(folder: Path) -> None:
    deadline = time.monotonic() + _EMPTY_SECONDS
    while True:
        try:
            folder.rmdir()
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.1)
        else:
            return
