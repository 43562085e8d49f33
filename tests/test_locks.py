"""What is installed is what was looked at: every version, and every file of it by its hash."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LOCKS = sorted((ROOT / "requirements").glob("*.txt"))


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.stem)
def test_every_requirement_has_one_version_and_hashes(lock: Path) -> None:
    lines = [line for line in lock.read_text().replace("\\\n", " ").splitlines() if not line.lstrip().startswith("#")]
    assert lines
    for line in lines:
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[^ ]+( +--hash=sha256:[0-9a-f]{64})+", line), line[:80]


def test_the_daemons_lock_has_no_torch() -> None:
    names = re.findall(r"^([A-Za-z0-9._-]+)==", (ROOT / "requirements/daemon.lock.txt").read_text(), re.MULTILINE)
    assert "nixl-cu12" in names
    assert not {"torch", "nixl", "nixl-cu13"} & set(names), "torch is not used; one build of NIXL is enough"


@pytest.mark.parametrize(("place", "locked"), [("Makefile", 4), ("deploy/kubernetes/Containerfile", 2)])
def test_locks_are_installed_by_their_hashes_and_nothing_else_is_resolved(place: str, locked: int) -> None:
    text = (ROOT / place).read_text()
    installs = re.findall(r"^.*(?:\(PIP_INSTALL\)|pip.* install --no-cache-dir).*$", text, re.MULTILINE)
    assert sum("--require-hashes --no-deps" in line for line in installs) == locked
    for line in installs:  # torch has a version alone: a machine may have a build of its own
        assert "--no-deps" in line or "torch==" in line, line
