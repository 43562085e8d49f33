"""The servers that tests of SGLang share."""

from pathlib import Path

from tests.serving.shared import LOST_SOON, SharedSets
from tests.sglang.testbed.pair import KvdPair
from tests.sglang.testbed.servers import Engine, Server
from tests.vllm.testbed.service import Service

OTHERS = ("gemma",)
"""Models of other kinds that SGLang runs on a CPU: sliding windows in the pages of all layers."""


class Compared:
    """A model on a pair, and on a server of its own."""

    def __init__(self, folder: Path, engine: Engine, ranks: tuple[int, int] = (1, 1)) -> None:
        self.pair = KvdPair(folder, engine, ranks)
        self.single = Server("single", folder, engine)

    @property
    def services(self) -> list[Service]:
        return [*self.pair.services, self.single]


class Mortal(Compared):
    """The same; its processes may be killed."""

    def __init__(self, folder: Path, engine: Engine, ranks: tuple[int, int] = (1, 1)) -> None:
        super().__init__(folder, engine, ranks)
        for daemon in self.pair.daemons.values():
            daemon.settings = LOST_SOON


class Shared(SharedSets):
    """Those sets, by what a test needs."""

    async def compared(self, model: str) -> Compared:
        return await self.running(f"compared-{model}", lambda folder: Compared(folder, Engine(self.models, model)))

    async def ranks(self, ranks: tuple[int, int]) -> Mortal:
        prefill, decode = ranks
        engine = Engine(self.models, "llama")
        return await self.running(f"ranks-{prefill}-{decode}", lambda folder: Mortal(folder, engine, ranks))

    async def mortal(self) -> Mortal:
        return await self.running("mortal", lambda folder: Mortal(folder, Engine(self.models, "llama")))
