"""Builds the stand-in driver: `libcuda.so.1` and the `libnvidia-ml.so.1` that UCX links to."""

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent / "driver"
CACHE = Path(tempfile.gettempdir()) / f"kvd-standin-{os.getuid()}"
FLAGS = ["-std=gnu11", "-Wall", "-Wextra", "-O1", "-g", "-shared", "-fPIC", "-fvisibility=hidden", "-pthread"]


class NoCompiler(Exception):
    """Nothing here can compile C."""


def build(folder: Path = CACHE, *, without: tuple[str, ...] = ()) -> Path:
    """The folder, below `folder`, of libraries built from these sources; they are built once for each content.

    `without` names functions that the libraries are to lack, as those of an older driver do. Raises NoCompiler.
    """
    content = hashlib.sha256(repr((FLAGS, without)).encode())
    for source in sorted(SOURCES.iterdir()):
        content.update(source.name.encode() + source.read_bytes())
    built = folder / content.hexdigest()[:16]
    if built.exists():
        return built
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise NoCompiler("the stand-in CUDA driver is built with gcc or cc, and neither is on PATH: install one")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        made = Path(temporary) / "made"
        made.mkdir()
        hidden = made / "hidden"
        hidden.write_text(f"{{ local: {'; '.join(without)}; }};")
        nvml = SOURCES / "nvml.c"
        driver = [source for source in sorted(SOURCES.glob("*.c")) if source != nvml]
        _link(compiler, made / "libnvidia-ml.so.1", [nvml])
        _link(compiler, made / "libcuda.so.1", driver, *([f"-Wl,--version-script={hidden}"] if without else []))
        try:
            made.rename(built)
        except OSError:
            if not built.exists():  # if it does, another process was faster
                raise
    return built


def _link(compiler: str, library: Path, sources: list[Path], *options: str) -> None:
    command = [compiler, *FLAGS, f"-Wl,-soname,{library.name}", "-o", library, *sources, *options, "-ldl"]
    subprocess.run([os.fspath(part) for part in command], check=True)
