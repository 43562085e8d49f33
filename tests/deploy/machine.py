"""A machine with a systemd of its own: a Debian tree booted by systemd-nspawn, with this checkout bound into it."""

import contextlib
import os
import shutil
import signal
import site
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from kvd.processes import Child
from tests.support.fleet import until

ROOT = Path(__file__).parents[2]
UNITS = ROOT / "deploy/systemd"
BOOT_SECONDS = 60
DEBOOTSTRAP_SECONDS = 180
_PATIENCE = 20
_TREE = ("--variant=minbase", "--include=systemd,dbus,libssl3,libffi8,zlib1g", "bookworm")

_MODULE = """#!/bin/sh
export PYTHONPATH=/opt/src:/opt/site LD_LIBRARY_PATH=/opt/python/lib PYTHONDONTWRITEBYTECODE=1
exec /opt/python/bin/python{version} -m "$@"
"""
_KVD = """#!/bin/sh
exec /opt/kvd/bin/module kvd.cli.main "$@"
"""
_DROP_IN = """[Service]
Environment=KVD_HEARTBEAT=0.3
WatchdogSec=5
"""


def why_not() -> str | None:
    """Why no machine can be booted here; None where one can."""
    if os.getuid() != 0:
        return "needs root"
    for tool in ("systemd-nspawn", "debootstrap", "nsenter"):
        if shutil.which(tool) is None:
            return f"needs {tool}: apt-get install systemd-container debootstrap util-linux"
    if sys.base_prefix == "/usr":
        return "needs a Python that can be bound into another tree (pyenv, uv), not the system's"
    return None


def tree(cache: Path) -> Path:
    """A Debian tree with systemd, from Debian's mirror; made once. Skips where it cannot be made, or not be entered."""
    made = Path(os.environ.get("KVD_TEST_TREE", cache / "bookworm"))
    if not made.exists():
        making = made.with_suffix(".part")
        shutil.rmtree(making, ignore_errors=True)
        making.mkdir(parents=True)
        # SIGTERM: debootstrap then unmounts what it mounted in the tree.
        command = ["timeout", f"--kill-after={_PATIENCE}", str(DEBOOTSTRAP_SECONDS), "debootstrap", *_TREE, str(making)]
        ran = subprocess.run(command, check=False, capture_output=True, text=True)
        if ran.returncode != 0:
            pytest.skip(f"debootstrap could not make a tree (status {ran.returncode}): {ran.stdout[-300:]}")
        making.rename(made)
    flags = ["--register=no", "--keep-unit", "--volatile=overlay", "--console=pipe"]
    command = ["systemd-nspawn", "--quiet", "--directory", str(made), *flags, "/usr/bin/true"]
    entered = subprocess.run(command, check=False, capture_output=True, text=True, timeout=BOOT_SECONDS)
    if entered.returncode != 0:
        pytest.skip(f"systemd-nspawn may not run a container here: {entered.stderr.strip()[-300:]}")
    return made


class Machine:
    """Booted when the `with` block is entered, gone when it is left; nothing is written to its tree."""

    def __init__(self, root: Path, folder: Path) -> None:
        self._root, self._folder = root, folder
        self._runs = 0
        self._leader = 0

    def __enter__(self) -> "Machine":
        binds = self._install()
        flags = ["--boot", "--keep-unit", "--register=no", "--volatile=overlay", "--link-journal=no", "--console=pipe"]
        command = ["systemd-nspawn", "--quiet", "--directory", str(self._root), *flags, *binds]
        self._container = Child("machine", command, self._folder / "machine.log", piped=False)
        try:
            self._leader = self._find_leader()
            self._await_boot()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._leader:
            with contextlib.suppress(subprocess.TimeoutExpired):  # what happened, for whoever looks at a failure
                (self._folder / "journal.txt").write_text(self.try_run("journalctl", "--no-pager").stdout)
            with contextlib.suppress(ProcessLookupError):  # nothing in it is worth an orderly end
                os.kill(self._leader, signal.SIGKILL)
            self._container.wait(10)
        self._container.stop()
        for folder in sorted(Path("/sys/fs/cgroup").glob("*/payload/**/"), reverse=True):
            with contextlib.suppress(OSError):
                folder.rmdir()

    def _install(self) -> list[str]:
        binaries, drop_ins = self._folder / "bin", self._folder / "kvd@.service.d"
        binaries.mkdir()
        drop_ins.mkdir()
        for name, text in {"module": _MODULE, "kvd": _KVD}.items():
            (binaries / name).write_text(text.format(version=sysconfig.get_python_version()))
            (binaries / name).chmod(0o755)
        for opened in (self._folder, *self._folder.parents):  # the user kvd must get through to the wrapper
            if opened.stat().st_uid == os.getuid() and opened.is_relative_to(self._folder):
                opened.chmod(0o755)
        (drop_ins / "test.conf").write_text(_DROP_IN)
        bound = {
            sys.base_prefix: "/opt/python",
            site.getsitepackages()[0]: "/opt/site",
            str(ROOT / "kvd"): "/opt/src/kvd",  # not their parent, which may be root's alone
            str(ROOT / "tests"): "/opt/src/tests",
            str(binaries): "/opt/kvd/bin",
            str(UNITS / "kvd@.service"): "/etc/systemd/system/kvd@.service",
            str(drop_ins): "/etc/systemd/system/kvd@.service.d",
            str(UNITS / "kvd.sysusers"): "/usr/lib/sysusers.d/kvd.conf",
        }
        return [f"--bind-ro={source}:{target}" for source, target in bound.items()]

    def _find_leader(self) -> int:
        children = Path(f"/proc/{self._container.pid}/task/{self._container.pid}/children")
        for _ in until("the container's first process", BOOT_SECONDS):
            if self._container.wait(0):
                raise self._container.ended()
            for child in children.read_text().split():
                with contextlib.suppress(FileNotFoundError):  # nspawn starts it by way of another process
                    if Path(f"/proc/{child}/comm").read_text() == "systemd\n":
                        return int(child)
        raise AssertionError("unreachable")

    def _await_boot(self) -> None:
        for _ in until("systemd is up", BOOT_SECONDS):
            state = self.try_run("systemctl", "is-system-running")
            if state.stdout.strip() in ("running", "degraded"):
                break
        self.run("systemd-sysusers")

    def try_run(self, *command: str, seconds: float = 60) -> subprocess.CompletedProcess[str]:
        entered = ["nsenter", "--target", str(self._leader), "--mount", "--uts", "--ipc", "--pid", "--", *command]
        return subprocess.run(entered, capture_output=True, text=True, timeout=seconds, check=False)

    def run(self, *command: str, seconds: float = 60) -> str:
        ran = self.try_run(*command, seconds=seconds)
        if ran.returncode != 0:
            journal = self.try_run("journalctl", "--no-pager", "--lines=40").stdout
            raise AssertionError(f"{' '.join(command)}: {ran.stderr}\n{journal}")
        return ran.stdout

    def show(self, unit: str, name: str) -> str:
        """One property of a unit."""
        return self.run("systemctl", "show", "--value", "--property", name, unit).strip()

    def start(self, name: str, module: str, *arguments: str, piped: bool = False) -> Child:
        """Runs a module of this checkout in the machine (as `kvd.processes.Processes.start`, for a Worker)."""
        self._runs += 1
        command = ["nsenter", "--target", str(self._leader), "--mount", "--uts", "--ipc", "--pid", "--"]
        command += ["/opt/kvd/bin/module", module, *arguments]
        return Child(name, command, self._folder / f"{name}-{self._runs}.log", piped=piped)
