"""A prefill and a decode server, with two kvd daemons between or with SGLang's own transfer backend."""

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.sglang.testbed.client import PATH, complete, make_body
from tests.sglang.testbed.serve import HOST_MEMORY
from tests.sglang.testbed.servers import Engine, Server
from tests.support.ports import free_port
from tests.vllm.testbed.client import Completion
from tests.vllm.testbed.http import HttpError, post
from tests.vllm.testbed.servers import Daemon
from tests.vllm.testbed.service import Service


class Pair:
    """Both servers have a transfer backend of SGLang's and `ranks`; the decode side keeps a prefix cache, too."""

    def __init__(self, name: str, folder: Path, engine: Engine, ranks: tuple[int, int] = (1, 1)) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._bootstrap_port = free_port()
        prefill, decode = ranks
        self.prefill = self._server(name, "prefill", folder, engine, prefill)
        self.decode = self._server(name, "decode", folder, engine, decode)

    def _server(self, name: str, side: str, folder: Path, engine: Engine, ranks: int) -> Server:
        flags = ["--disaggregation-mode", side, "--disaggregation-transfer-backend", name]
        flags += ["--disaggregation-bootstrap-port", str(self._bootstrap_port)]
        if side == "decode":
            flags += ["--disaggregation-decode-enable-radix-cache"]
            flags += ["--disaggregation-decode-retraction-backup", "cpu_tensor"]  # the other kind pins memory by CUDA
        return Server(f"{name}-{side}", folder, engine, *flags, ranks=ranks)

    @property
    def services(self) -> Sequence[Service]:
        """All processes, in the order in which they start."""
        return [self.prefill, self.decode]

    def roomed(self, body: dict[str, Any]) -> dict[str, Any]:
        """What a router of SGLang sends to both sides: where they find each other, and the request's number there."""
        room = random.getrandbits(63)  # no secret
        return body | {"bootstrap_host": "127.0.0.1", "bootstrap_port": self._bootstrap_port, "bootstrap_room": room}

    async def complete(self, prompt: list[int], tokens: int, **more: Any) -> Completion:
        """The completion of a prompt whose prefill runs on one server and whose decode on the other.

        Raises:
            HttpError: Either side gave no good answer.

        """
        body = self.roomed(make_body(prompt, tokens, **more))
        prefill = asyncio.create_task(post(self.prefill.url, PATH, body))
        decode = asyncio.create_task(complete(self.decode.url, body))
        try:  # as SGLang's router: where one side refuses, the other one waits for nothing
            answer, completion = await asyncio.gather(prefill, decode)
        finally:
            prefill.cancel()
            decode.cancel()
        finished = answer["meta_info"]["finish_reason"]
        if finished["type"] == "abort":
            raise HttpError(0, f"{self.prefill.url}: {finished}")
        return completion


class KvdPair(Pair):
    """One with a daemon for each rank of a side: that of rank 0 is called by its side, `decode`, others `decode 1`."""

    def __init__(self, folder: Path, engine: Engine, ranks: tuple[int, int] = (1, 1)) -> None:
        super().__init__("kvd", folder, engine, ranks)
        self.daemons: dict[str, Daemon] = {}
        for side, server in (("prefill", self.prefill), ("decode", self.decode)):
            name = f"kvd-{side}-daemon" + ("-{rank}" if server.ranks > 1 else "")
            server.variables = {"KVD_SOCKET": str(folder / f"{name}.sock")}
            for rank in range(server.ranks):
                self.daemons[f"{side} {rank}" if rank else side] = Daemon(name.format(rank=rank), folder)

    @property
    def services(self) -> Sequence[Service]:
        """All processes, in the order in which they start: a server attaches when it does."""
        return [*self.daemons.values(), *super().services]


class NixlPair(Pair):
    """One with SGLang's own backend `nixl`, over UCX."""

    def __init__(self, folder: Path, engine: Engine) -> None:
        super().__init__("nixl", folder, engine)
        for server in (self.prefill, self.decode):
            server.variables = {HOST_MEMORY: "1"}
