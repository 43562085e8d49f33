"""SGLang servers as processes: what each is started with, and how one sees that it is up."""

import itertools
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.support.ports import free_port
from tests.vllm.testbed.catalog import OFFLINE
from tests.vllm.testbed.http import HttpError, get
from tests.vllm.testbed.service import Service, with_environment

PAGE: Final = 16
"""Tokens a page."""

CHUNK: Final = 64
"""Tokens that one step prefills."""

LONGEST: Final = 1024
"""Tokens of a prompt and its completion."""

TOKENS: Final = 8192
"""Of a KV cache where nothing else is asked for."""

MODEL_FLAGS: Final[dict[str, tuple[str, ...]]] = {}
"""What a server needs beside the flags that all have."""


@dataclass(frozen=True)
class Engine:
    """What an SGLang server runs: a model of the catalog in `models`/`model`, with room for so many tokens."""

    models: Path
    model: str
    tokens: int = TOKENS


class Server(Service):
    """An SGLang; `flags` and `variables` are more flags and environment variables, from the next start on."""

    def __init__(self, name: str, folder: Path, engine: Engine, *flags: str, ranks: int = 1) -> None:
        super().__init__(name, folder)
        self.engine = engine
        self.ranks = ranks
        """How many split the heads."""
        self.flags = flags
        self.variables: dict[str, str] = {}
        self.interpreter = sys.executable
        """That of an environment with SGLang."""
        self.with_tokenizer = False
        """Whether it takes requests of OpenAI's kind."""
        self.port = free_port()

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    def command(self) -> Sequence[str]:
        """As users start it, but for the CPU, on one thread: servers share as few as two cores."""
        engine = self.engine
        variables = OFFLINE | {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "TMPDIR": self.temporary()}
        cores = itertools.cycle(sorted(os.sched_getaffinity(0)))
        if self.ranks > 1:  # else SGLang wants a NUMA node for each
            variables["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(next(cores)) for _ in range(self.ranks))
        command = [
            self.interpreter,
            "-m",
            "tests.sglang.testbed.serve",
            "--model-path",
            str(engine.models / engine.model),
        ]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--device", "cpu", "--dtype", "float32"]
        command += ["--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--grammar-backend", "none"]
        command += ["--disable-overlap-schedule", "--skip-server-warmup", "--sleep-on-idle"]
        command += [] if self.with_tokenizer else ["--skip-tokenizer-init"]
        command += ["--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled"]
        command += ["--tp-size", str(self.ranks)]
        command += ["--page-size", str(PAGE), "--chunked-prefill-size", str(CHUNK), "--context-length", str(LONGEST)]
        command += ["--max-total-tokens", str(engine.tokens), "--mem-fraction-static", "0.5", "--random-seed", "0"]
        return with_environment(variables | self.variables, [*command, *MODEL_FLAGS.get(engine.model, ()), *self.flags])

    async def is_up(self) -> bool:
        """Whether it answers: it does when its scheduler is ready."""
        try:
            await get(self.url, "/model_info")
        except HttpError:
            return False
        return True
