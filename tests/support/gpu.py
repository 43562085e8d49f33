"""The stand-in driver for tests: a machine that has it, and tests in a process of their own.

In this process NIXL would see the driver in the next tests, too. With TESTS_ON_GPU=1 such tests run on a GPU of this
machine instead, except those that change the stand-in.
"""

import importlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import pytest

from tests.standin.build import NoCompiler, build
from tests.standin.children import environment
from tests.standin.driver import StandinDriver
from tests.support import forkserver

SECONDS = 100
ON_GPU = "TESTS_ON_GPU" in os.environ


@contextmanager
def standin_machine(folder: Path) -> Iterator[StandinDriver]:
    """A machine with a stand-in GPU, whose settings lie in `folder`; skips the test where no driver can be built."""
    try:
        libraries = build()
    except NoCompiler as error:
        pytest.skip(str(error))
    with StandinDriver(libraries, folder / "control") as driver:
        yield driver


MEMORIES: Final = {
    "host-to-host": ("cpu", "cpu"),
    "gpu-to-gpu": ("cuda:0", "cuda:0"),
    "gpu-to-host": ("cuda:0", "cpu"),
    "host-to-gpu": ("cpu", "cuda:0"),
}
"""The devices of a producer's pools and of a consumer's."""


@contextmanager
def machine_with(devices: tuple[str, ...], folder: Path) -> Iterator[StandinDriver | None]:
    """If one of `devices` is a GPU, processes that are started have the stand-in's, whose memory the CPU sees."""
    with ExitStack() as stack:
        gpu = None
        if any(device != "cpu" for device in devices):
            gpu = stack.enter_context(standin_machine(folder))
            gpu.set(cpu_visible=1)
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            for name, value in gpu.environment.items():
                patch.setenv(name, value)
        yield gpu


def over_standin(
    *, env: dict[str, str] | None = None, without: tuple[str, ...] = (), **settings: int
) -> Callable[..., Callable[..., None]]:
    """Runs the body of a test in a child that has the stand-in driver, set to `settings`, and `env`.

    The driver lacks the functions `without`. The child has a temporary folder of its own, which ends with it.
    """

    def decorate(body: Callable[[], None]) -> Callable[..., None]:
        def test(standin: StandinDriver) -> None:
            if ON_GPU and (settings or without):
                pytest.skip("changes the stand-in")
            standin.set(**settings)
            stood_in = environment(standin, LD_LIBRARY_PATH=str(build(without=without)))
            with tempfile.TemporaryDirectory(prefix="kvd-") as folder:
                status, said = forkserver.run(
                    ["tests.support.gpu", body.__module__, body.__name__],
                    {**(os.environ if ON_GPU else stood_in), **(env or {}), "TMPDIR": folder},
                    SECONDS,
                )
            assert status == 0, said

        test.body = body
        test.__name__, test.__doc__, test.__module__ = body.__name__, body.__doc__, body.__module__
        return test

    return decorate


if __name__ == "__main__":
    getattr(importlib.import_module(sys.argv[1]), sys.argv[2]).body()
