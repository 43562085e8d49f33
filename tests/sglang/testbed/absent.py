"""Stand-ins for modules that SGLang imports at its start and that a text model on the CPU never calls.

They need CUDA, or have no build for this torch; SGLang has no package without them.
"""

import importlib.abc
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

ABSENT = frozenset({"IPython", "torchvision", "gguf", "sgl_kernel", "soundfile", "torchaudio", "cutlass", "quack"})


class _StandIn(MagicMock):
    """A module in which everything is found."""

    __path__: Sequence[str] = ()


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] in ABSENT:
            return ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> Any:
        module = _StandIn(name=spec.name)
        module.__spec__, module.__name__, module.__path__ = spec, spec.name, []
        module.__version__, module.__file__ = "0.0", ""
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: it is there."""


def stand_in() -> None:
    """Lets the absent modules be imported, in this process and those that it forks."""
    sys.meta_path.insert(0, _Finder())
