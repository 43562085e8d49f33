"""A prefill and a decode server with two kvd daemons between, or SGLang's own backend."""

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.sglang.testbed.client import PATH, complete, make_body
from tests.sglang.testbed.servers import Engine, Server
from tests.support.ports import free_port
from tests.vllm.testbed.client import Completion
from tests.vllm.testbed.http import HttpError, post
from tests.vllm.testbed.servers import Daemon
from tests.vllm.testbed.service import Service


class KvdPair:
    """A daemon for each side. The decode side keeps a prefix cache, too."""

    def __init__(self, folder: Path, engine: Engine) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.daemons = {side: Daemon(f"kvd-{side}-daemon", folder) for side in ("prefill", "decode")}
        self._bootstrap_port = free_port()
        self.prefill, self.decode = (self._server(side, folder, engine) for side in ("prefill", "decode"))

    def _server(self, side: str, folder: Path, engine: Engine) -> Server:
        flags = ["--disaggregation-mode", side, "--disaggregation-transfer-backend", "kvd"]
        flags += ["--disaggregation-bootstrap-port", str(self._bootstrap_port)]
        if side == "decode":
            flags += ["--disaggregation-decode-enable-radix-cache"]
            flags += ["--disaggregation-decode-retraction-backup", "cpu_tensor"]  # the other kind pins memory by CUDA
        server = Server(f"kvd-{side}", folder, engine, *flags)
        server.variables = {"KVD_SOCKET": str(self.daemons[side].socket)}
        return server

    @property
    def services(self) -> Sequence[Service]:
        """All processes, in the order in which they start: a server attaches when it does."""
        return [*self.daemons.values(), self.prefill, self.decode]

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
        try:
            completion = await complete(self.decode.url, body)
            finished = (await prefill)["meta_info"]["finish_reason"]
        finally:
            prefill.cancel()
        if finished["type"] == "abort":
            raise HttpError(0, f"{self.prefill.url}: {finished}")
        return completion
