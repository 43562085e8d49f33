"""A machine with a systemd of its own: a Debian tree booted by systemd-nspawn, with this checkout bound into it."""

import contextlib
import os
import shutil
import signal
import site
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvd.processes import Child
from tests.support.fleet import until
from tests.support.patience import NEVER_LOST, PATIENCE

ROOT = Path(__file__).parents[2]
UNITS = ROOT / "deploy/systemd"
DEBOOTSTRAP_SECONDS = 180
_UNMOUNT_SECONDS = 20
_CGROUPS = Path("/sys/fs/cgroup")
_TREE = ("--variant=minbase", "--include=systemd,dbus,libssl3,libffi8,zlib1g", "bookworm")

_MODULE = """#!/bin/sh
export PYTHONPATH=/opt/src:/opt/site LD_LIBRARY_PATH=/opt/python/lib PYTHONDONTWRITEBYTECODE=1
exec /opt/python/bin/python{version} -m "$@"
"""
_KVD = """#!/bin/sh
exec /opt/kvd/bin/module kvd.cli.main "$@"
"""
_DROP_IN = f"""[Service]
Environment={" ".join(f"KVD_{name.upper()}={value}" for name, value in NEVER_LOST.items())}
WatchdogSec=30
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
    """A Debian tree with systemd, from Debian's mirror; made once. Skips where it cannot be made, or not be entered.

    It lies at `KVD_TEST_TREE`, which other checkouts may use, too; in `cache` where that is not set.
    """
    made = Path(os.environ.get("KVD_TEST_TREE", cache / "bookworm"))
    if not made.exists():
        _make(made)
    flags = ["--register=no", "--keep-unit", "--volatile=overlay", "--console=pipe"]
    with own_cgroup() as within:
        command = [*within, "systemd-nspawn", "--quiet", "--directory", str(made), *flags, "/usr/bin/true"]
        entered = subprocess.run(command, check=False, capture_output=True, text=True, timeout=PATIENCE)
    if entered.returncode != 0:
        pytest.skip(f"systemd-nspawn may not run a container here: {entered.stderr.strip()[-300:]}")
    return made


def _make(tree: Path) -> None:
    making = tree.with_name(f"{tree.name}.{os.getpid()}")
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir(parents=True)
    # SIGTERM: debootstrap then unmounts what it mounted in the tree.
    limit = ["timeout", f"--kill-after={_UNMOUNT_SECONDS}", str(DEBOOTSTRAP_SECONDS)]
    ran = subprocess.run([*limit, "debootstrap", *_TREE, str(making)], check=False, capture_output=True, text=True)
    if ran.returncode != 0:
        shutil.rmtree(making, ignore_errors=True)
        pytest.skip(f"debootstrap could not make a tree (status {ran.returncode}): {ran.stdout[-300:]}")
    try:
        making.rename(tree)
    except OSError:  # another run was faster
        shutil.rmtree(making)


@contextlib.contextmanager
def own_cgroup() -> Iterator[list[str]]:
    """A cgroup for one container; yields the command that runs another in it.

    Containers of one cgroup would have one `payload` between them: their systemds would end each other's units.
    """
    mounts = {"name=systemd": "systemd", "": "" if (_CGROUPS / "cgroup.procs").exists() else "unified"}
    made = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, hierarchy, ours = line.split(":", 2)
        if hierarchy in mounts and (_CGROUPS / mounts[hierarchy]).is_dir():
            made.append(_CGROUPS / mounts[hierarchy] / ours.lstrip("/") / f"kvd-test-{os.getpid()}")
            made[-1].mkdir()
    enter = "; ".join(f"echo $$ > {folder}/cgroup.procs" for folder in made)
    try:
        yield ["sh", "-c", f'{enter}; exec "$@"', "sh"]
    finally:
        for _ in until("the container's cgroups are empty"):
            for folder in (below for top in made for below in sorted(top.glob("**/"), reverse=True)):
                with contextlib.suppress(OSError):
                    folder.rmdir()
            if not any(top.exists() for top in made):
                break


class Machine:
    """Booted when the `with` block is entered, gone when it is left; nothing is written to its tree."""

    def __init__(self, root: Path, folder: Path) -> None:
        self._root, self._folder = root, folder
        self._runs = 0
        self._leader = 0

    def __enter__(self) -> "Machine":
        binds = self._install()
        flags = ["--boot", "--keep-unit", "--register=no", "--volatile=overlay", "--link-journal=no", "--console=pipe"]
        self._resources = contextlib.ExitStack()
        within = self._resources.enter_context(own_cgroup())
        command = [*within, "systemd-nspawn", "--quiet", "--directory", str(self._root), *flags, *binds]
        self._container = Child.start("machine", command, self._folder / "machine.log", piped=False)
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
            self._container.wait(PATIENCE)
        self._container.stop()
        self._resources.close()

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
        for _ in until("the container's first process"):
            if self._container.wait(0):
                raise self._container.ended()
            for child in children.read_text().split():
                with contextlib.suppress(FileNotFoundError):  # nspawn starts it by way of another process
                    if Path(f"/proc/{child}/comm").read_text() == "systemd\n":
                        return int(child)
        raise AssertionError("unreachable")

    def _await_boot(self) -> None:
        for _ in until("systemd is up"):
            state = self.try_run("systemctl", "is-system-running")
            if state.stdout.strip() in ("running", "degraded"):
                break
        self.run("systemd-sysusers")

    def try_run(self, *command: str) -> subprocess.CompletedProcess[str]:
        entered = ["nsenter", "--target", str(self._leader), "--mount", "--uts", "--ipc", "--pid", "--", *command]
        return subprocess.run(entered, capture_output=True, text=True, timeout=PATIENCE, check=False)

    def run(self, *command: str) -> str:
        ran = self.try_run(*command)
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
        return Child.start(name, command, self._folder / f"{name}-{self._runs}.log", piped=piped)
