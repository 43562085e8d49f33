"""vLLM servers and kvd daemons as processes: what each is started with, and how one sees that it is up."""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from prometheus_client.parser import text_string_to_metric_families

from tests.support.patience import NEVER_LOST
from tests.support.ports import free_port
from tests.vllm.testbed.catalog import BLOCK, FLAGS, GROUPS, OFFLINE
from tests.vllm.testbed.http import HttpError, get
from tests.vllm.testbed.service import Service, with_environment

LONGEST = 2048
"""Tokens of a prompt and its completion."""

BLOCKS = 256
"""Blocks of a KV cache where nothing else is asked for: 8,192 tokens, 1 GiB of the model of the bench."""

POOL_BYTES = 1 << 23
"""The least of all models here; daemons have no other files in memory as large."""

SHARED_MEMORY = f"k{os.getpid()}_"
"""How the names of the servers' shared memory begin: those of others on this machine begin otherwise."""


N_GRAMS: Final = "n-grams"
"""The drafter without a model: what followed the last tokens where the request had them before."""


@dataclass(frozen=True)
class Engine:
    """What a vLLM server runs: a model of the catalog in `models`/`model`."""

    models: Path
    model: str
    blocks: int = BLOCKS
    """Of the KV cache, a group."""
    spread: str = ""
    """A flag of vLLM that sets a number of workers: there are two then."""
    drafter: str = ""
    """What drafts two tokens a step: an EAGLE model of the catalog, or `N_GRAMS`."""


class Server(Service):
    """A vLLM; `transfer` is its kv-transfer-config, without which it is a single server."""

    def __init__(self, name: str, folder: Path, engine: Engine, transfer: dict[str, Any] | None = None) -> None:
        super().__init__(name, folder)
        self.engine = engine
        self.transfer = transfer
        self.variables: dict[str, str] = {}
        """More environment variables, from the next start on."""
        self.flags: Sequence[str] = ()
        """More flags, from the next start on."""
        self.interpreter = sys.executable
        """That of an environment with vLLM."""
        self.port = free_port()
        self._side_channel = free_port()

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    def command(self) -> Sequence[str]:
        """As users start it, but that one thread computes: two servers share as few as two cores.

        And torch compiles nothing: of these models that is one comparison, for which the first request would wait ten
        seconds.
        """
        engine = self.engine
        variables = OFFLINE | {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self._side_channel),
            "VLLM_NO_USAGE_STATS": "1",
            "TORCH_COMPILE_DISABLE": "1",
            "TMPDIR": self.temporary(),
            "TESTBED_SHARED_MEMORY": SHARED_MEMORY,
        }
        command = [self.interpreter, "-m", "tests.vllm.testbed.serve", "--model", str(engine.models / engine.model)]
        command += ["--served-model-name", engine.model, "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--enforce-eager", "--dtype", "float32", "--seed", "0", "--max-model-len", str(LONGEST)]
        command += ["--disable-uvicorn-access-log"]
        blocks = engine.blocks * GROUPS.get(engine.model, 1)
        command += ["--block-size", str(BLOCK), "--num-gpu-blocks-override", str(blocks)]
        command += FLAGS.get(engine.model, ())
        if engine.spread:
            command += [engine.spread, "2"]
        if engine.drafter:
            command += ["--speculative-config", json.dumps(_drafts(engine) | {"num_speculative_tokens": 2})]
        if self.transfer is not None:
            command += ["--kv-transfer-config", json.dumps(self.transfer)]
        command += self.flags
        return with_environment(variables | self.variables, command)

    async def is_up(self) -> bool:
        """Whether it says that it is healthy."""
        try:
            await get(self.url, "/health")
        except HttpError:
            return False
        return True


def _drafts(engine: Engine) -> dict[str, Any]:
    if engine.drafter == N_GRAMS:
        return {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 2}
    return {"method": "eagle", "model": str(engine.models / engine.drafter)}


class Daemon(Service):
    """A kvd daemon; peers and workers find it at the same place after every start."""

    needed_first = True

    def __init__(self, name: str, folder: Path) -> None:
        super().__init__(name, folder)
        self.socket = folder / f"{name}.sock"
        self.settings: dict[str, str] = dict(NEVER_LOST)
        """More settings, from the next start on; and environment variables."""
        self.variables: dict[str, str] = {}

    def command(self) -> Sequence[str]:
        """It runs `kvd serve`."""
        command = [sys.executable, "-m", "kvd.cli.main", "serve", "--name", self.name, "--socket", str(self.socket)]
        command += ["--http", "127.0.0.1:0", "--log-format", "json"]
        for name, value in self.settings.items():
            command += [f"--{name.replace('_', '-')}", value]
        return with_environment(self.variables, command)

    @property
    def url(self) -> str:
        """Where its metrics are."""
        return f"http://{self._serving()['http']}"

    def pool(self) -> bytes:
        """What lies in its worker's pool now."""
        for link in (link for pid in self._members() for link in Path(f"/proc/{pid}/fd").iterdir()):
            if os.readlink(link).startswith("/memfd:") and link.stat().st_size >= POOL_BYTES:
                return link.read_bytes()
        raise AssertionError(f"{self.name} has no pool of {POOL_BYTES} bytes or more")

    async def is_up(self) -> bool:
        """Whether it logged that it serves."""
        return bool(self._serving())

    def _serving(self) -> dict[str, Any]:
        for line in self.log.read_text(errors="replace").splitlines():
            if '"serving"' in line:
                event: dict[str, Any] = json.loads(line)
                return event
        return {}


class RouterProcess(Service):
    """The router between a prefill and a decode server, or servers at such URLs; `flags` are more of its own."""

    def __init__(
        self, folder: Path, prefill: "Server | str", decode: "Server | str", *flags: str, name: str = "router"
    ) -> None:
        super().__init__(name, folder)
        self._flags = flags
        self._port = free_port()
        self._servers = (prefill, decode)

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self._port}"

    def command(self) -> Sequence[str]:
        """It runs `kvd router`."""
        prefill, decode = (server if isinstance(server, str) else server.url for server in self._servers)
        command = [sys.executable, "-m", "kvd.cli.main", "router", "--listen", f"127.0.0.1:{self._port}"]
        return [*command, "--prefill", prefill, "--decode", decode, *self._flags]

    async def is_up(self) -> bool:
        """Whether it is ready."""
        try:
            await get(self.url, "/readyz")
        except HttpError:
            return False
        return True


class Metrics:
    """What a server or a daemon counts, as of one moment."""

    def __init__(self, text: str) -> None:
        self._samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]

    def total(self, name: str, **labels: str) -> float:
        """The samples of this name that have these labels, added up; 0 where there are none."""
        return sum(
            sample.value for sample in self._samples if sample.name == name and labels.items() <= sample.labels.items()
        )


async def scrape(service: "Server | Daemon | RouterProcess") -> Metrics:
    """The metrics of a server, a daemon or a router now."""
    return Metrics((await get(service.url, "/metrics")).decode())
