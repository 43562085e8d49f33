"""A pair of two engines, with a router before it: prefill in vLLM and decode in SGLang, the other way, or two SGLangs.

Each engine has an environment of its own, so a server runs with the interpreter of its engine's.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from tests.serving.shared import LOST_SOON, SharedSets
from tests.sglang.testbed.servers import Engine as SglangEngine
from tests.sglang.testbed.servers import Server as SglangServer
from tests.support.ports import free_port
from tests.vllm.testbed.client import Completion, complete, make_body
from tests.vllm.testbed.servers import Daemon, RouterProcess
from tests.vllm.testbed.servers import Engine as VllmEngine
from tests.vllm.testbed.servers import Server as VllmServer
from tests.vllm.testbed.service import Service

ROOT = Path(__file__).parents[2]
INTERPRETERS = {
    engine: Path(os.environ.get(f"KVD_TEST_{engine.upper()}", ROOT / f".venv-{engine}")) / "bin" / "python"
    for engine in ("vllm", "sglang")
}
"""By engine; `make setup-vllm` and `make setup-sglang` make their environments."""

Sides = tuple[str, str]
"""The engines that prefill and decode."""

SIDES: tuple[Sides, ...] = (("vllm", "sglang"), ("sglang", "vllm"))
"""Those that cross; two SGLangs meet behind the router, too."""

NAME = "ours"
"""The model as both engines tell peers of it."""


def sglang(name: str, folder: Path, models: Path, model: str, *flags: str) -> SglangServer:
    """An SGLang that takes requests of OpenAI's kind: its test bed's has no tokenizer."""
    server = SglangServer(name, folder, SglangEngine(models, model), *flags)
    server.interpreter = str(INTERPRETERS["sglang"])
    server.with_tokenizer = True
    return server


def vllm(name: str, folder: Path, models: Path, model: str, transfer: dict[str, object] | None = None) -> VllmServer:
    server = VllmServer(name, folder, VllmEngine(models, model), transfer)
    server.interpreter = str(INTERPRETERS["vllm"])
    return server


class AcrossPair:
    """A prefill and a decode server, each with a daemon, and a router."""

    def __init__(self, folder: Path, models: Path, model: str, sides: Sides) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.model = model
        self.daemons = {side: Daemon(f"kvd-{side}-daemon", folder) for side in ("prefill", "decode")}
        self.single: dict[str, VllmServer | SglangServer] = {
            "vllm": vllm("single-vllm", folder, models, model),
            "sglang": sglang("single-sglang", folder, models, model),
        }
        engines = dict(zip(("prefill", "decode"), sides, strict=True))
        self.bootstrap_port = free_port()
        self.servers = {side: self._server(side, engine, folder, models) for side, engine in engines.items()}
        self.engines = engines
        self.router = RouterProcess(folder, *(self._url(side) for side in ("prefill", "decode")))

    def _server(self, side: str, engine: str, folder: Path, models: Path) -> VllmServer | SglangServer:
        name, variables = f"kvd-{side}", {"KVD_SOCKET": str(self.daemons[side].socket)}
        server: VllmServer | SglangServer
        if engine == "vllm":
            extra = {"model": NAME, "offer_ttl": 120.0, "pull_timeout": 120.0}
            transfer = {"kv_connector": "KvdConnector", "kv_connector_module_path": "kvd.engines.vllm"}
            transfer |= {"kv_role": "kv_both", "kv_load_failure_policy": "fail", "kv_connector_extra_config": extra}
            server = vllm(name, folder, models, self.model, transfer)
        else:
            flags = ["--disaggregation-mode", side, "--disaggregation-transfer-backend", "kvd"]
            flags += ["--disaggregation-bootstrap-port", str(self.bootstrap_port)]
            if side == "decode":
                flags += ["--disaggregation-decode-enable-radix-cache"]
                flags += ["--disaggregation-decode-retraction-backup", "cpu_tensor"]
            server = sglang(name, folder, models, self.model, *flags)
            variables["KVD_SGLANG"] = f'{{"model": "{NAME}", "offer_ttl": 120.0, "pull_timeout": 120.0}}'
        server.variables = variables
        return server

    def _url(self, side: str) -> str:
        url = self.servers[side].url
        if self.engines[side] == "vllm":
            return url
        return url.replace("http", "sglang", 1) + (f"?bootstrap={self.bootstrap_port}" if side == "prefill" else "")

    @property
    def services(self) -> Sequence[Service]:
        """All processes but the single servers, in the order in which they start."""
        return [*self.daemons.values(), *self.servers.values(), self.router]

    def body(self, prompt: list[int], tokens: int, **more: object) -> dict[str, object]:
        """A request for exactly `tokens` tokens, always the likeliest."""
        return make_body(self.model, prompt, tokens, **more)

    async def complete(self, prompt: list[int], tokens: int, **more: object) -> Completion:
        """The completion through the router.

        Raises:
            HttpError: There was no good answer.

        """
        return await complete(self.router.url, self.body(prompt, tokens, **more))


class Compared(AcrossPair):
    """The same beside a single server of either engine."""

    @property
    def services(self) -> Sequence[Service]:
        return [*super().services, *self.single.values()]


class Mortal(AcrossPair):
    """A pair whose processes may be killed, beside a single server of the engine that decodes."""

    def __init__(self, folder: Path, models: Path, model: str, sides: Sides) -> None:
        super().__init__(folder, models, model, sides)
        self.alone = self.single[self.engines["decode"]]
        for daemon in self.daemons.values():
            daemon.settings = LOST_SOON

    @property
    def services(self) -> Sequence[Service]:
        return [*super().services, self.alone]

    @property
    def victims(self) -> dict[str, Service]:
        """All but the router and the single server."""
        daemons = {f"{side} daemon": daemon for side, daemon in self.daemons.items()}
        return daemons | {f"{side} server": server for side, server in self.servers.items()}


class Shared(SharedSets):
    """One pair at a time."""

    async def mortal(self, model: str, sides: Sides) -> Mortal:
        name = f"mortal-{'-'.join(sides)}"
        return await self.running(name, lambda folder: Mortal(folder, self.models, model, sides))

    async def compared(self, model: str, sides: Sides) -> Compared:
        name = f"{model}-{'-'.join(sides)}"
        return await self.running(name, lambda folder: Compared(folder, self.models, model, sides))
