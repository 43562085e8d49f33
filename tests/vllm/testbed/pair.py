"""A prefill and a decode server with what moves KV between them: two kvd daemons, or vLLM's own NixlConnector."""

import asyncio
import contextlib
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.vllm.testbed.client import Completion, complete, make_body, prefill
from tests.vllm.testbed.http import HttpError
from tests.vllm.testbed.servers import BLOCKS, Daemon, Engine, Server
from tests.vllm.testbed.service import Service


class Pair(ABC):
    """A prefill server and a decode server.

    `policy` is what the decode side does with requests whose KV does not come: `fail` or `recompute`. The prefill side
    computes: of an earlier turn it may find nothing any more. `blocks` is the size of either KV cache; `spread` the
    flag by which a side has two workers; `drafters` the drafter of a side that has one.
    """

    name: str
    """Of its processes and their logs."""
    title: str
    """For people."""

    def __init__(
        self,
        folder: Path,
        models: Path,
        model: str,
        *,
        policy: str = "fail",
        blocks: int = BLOCKS,
        spread: Mapping[str, str] = MappingProxyType({}),
        drafters: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.policy = policy
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

        def server(side: str) -> Server:
            engine = Engine(models, model, blocks, spread.get(side, ""), drafters.get(side, ""))
            return Server(f"{self.name}-{side}", folder, engine, self._config(side))

        self.prefill, self.decode = server("prefill"), server("decode")

    def _config(self, side: str) -> dict[str, Any]:
        policy = self.policy if side == "decode" else "recompute"
        return {"kv_role": "kv_both", "kv_load_failure_policy": policy, **self.connector(side)}

    @abstractmethod
    def connector(self, side: str) -> dict[str, Any]:
        """The connector's part of the kv-transfer-config of one side."""

    @property
    def services(self) -> list[Service]:
        """All processes, in the order in which they start."""
        return [self.prefill, self.decode]

    async def complete(self, prompt: list[int], tokens: int, **more: Any) -> Completion:
        """The completion of a prompt whose prefill runs on one server and whose decode on the other.

        Raises:
            HttpError: Either side gave no good answer.

        """
        body = make_body(self.prefill.engine.model, prompt, tokens, **more)
        params = await prefill(self.prefill.url, body)
        return await complete(self.decode.url, body | {"kv_transfer_params": params})


class KvdPair(Pair):
    """With a daemon for each worker; `extra` are further settings of the connector."""

    name = "kvd"
    title = "kvd"

    def __init__(
        self,
        folder: Path,
        models: Path,
        model: str,
        *,
        policy: str = "fail",
        blocks: int = BLOCKS,
        spread: Mapping[str, str] = MappingProxyType({}),
        drafters: Mapping[str, str] = MappingProxyType({}),
        extra: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        self._extra = extra
        self.daemons = {side: Daemon(f"kvd-{side}-daemon-0", folder) for side in ("prefill", "decode")}
        """Of rank 0, by side."""
        self.others = [Daemon(f"kvd-{side}-daemon-1", folder) for side in spread]
        self._spread = spread
        self._producer: object = None
        """Where the daemons of the prefill side are, once it has said so."""
        super().__init__(folder, models, model, policy=policy, blocks=blocks, spread=spread, drafters=drafters)

    async def begin_early(self, body: dict[str, Any]) -> "tuple[asyncio.Task[dict[str, Any]], dict[str, Any]]":
        """Begins a prefill whose blocks can be read meanwhile, and returns the body for the decode side."""
        if self._producer is None:
            first = make_body(body["model"], body["prompt"][:2], 1)
            params = await prefill(self.prefill.url, first)
            self._producer = params["kvd_producer"]
            await complete(self.decode.url, first | {"kv_transfer_params": params})
        offer = "kvdo1." + secrets.token_urlsafe(24)
        told = {"do_remote_prefill": True, "kvd_offer": offer, "kvd_producer": self._producer}
        prefilling = asyncio.create_task(prefill(self.prefill.url, body, kvd_offer=offer))
        return prefilling, body | {"kv_transfer_params": told}

    async def complete_early(self, prompt: list[int], tokens: int, **more: Any) -> Completion:
        """The completion of a prompt of which both servers get the request at once.

        Raises:
            HttpError: The decode side gave no good answer, and the prefill side none that could be used instead.

        """
        body = make_body(self.prefill.engine.model, prompt, tokens, **more)
        prefilling, decoding = await self.begin_early(body)
        try:
            return await complete(self.decode.url, decoding)
        except HttpError:
            params = await prefilling
            if "kvd_ticket" not in params:
                raise
            return await complete(self.decode.url, body | {"kv_transfer_params": params})
        finally:
            prefilling.cancel()
            await asyncio.wait((prefilling,))

    def connector(self, side: str) -> dict[str, Any]:
        """Names the sockets of the daemons of that side."""
        number = "{dp_rank}" if "data" in self._spread.get(side, "") else "{rank}"
        return {
            "kv_connector": "KvdConnector",
            "kv_connector_extra_config": {
                "socket": str(self.folder / f"kvd-{side}-daemon-{number}.sock"),
                **self._extra,
            },
        }

    @property
    def services(self) -> list[Service]:
        """Daemons first: a server attaches when it starts."""
        return [*self.daemons.values(), *self.others, *super().services]


class MultiPair(KvdPair):
    """With MultiConnector: kvd between the servers, and on each vLLM's connector that keeps prompts in files."""

    name = "multi"
    title = "MultiConnector"

    def connector(self, side: str) -> dict[str, Any]:
        """Both connectors of that side, kvd first."""
        files = {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(self.folder / f"{side}-files")},
        }
        parts = [super().connector(side) | {"kv_role": "kv_both"}, files]
        return {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": parts}}


class NixlPair(Pair):
    """With vLLM's connector, which runs in the engines; the decode side pulls. NIXL has `threads`, else four."""

    name = "nixl"
    title = "NixlConnector"

    def __init__(
        self,
        folder: Path,
        models: Path,
        model: str,
        *,
        blocks: int = BLOCKS,
        threads: int | None = None,
        drafters: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._extra: dict[str, int] = {}
        if threads is not None:
            self._extra = {"num_threads": threads}
            self.name, self.title = f"nixl-{threads}", f"NixlConnector, num_threads {threads}"
        super().__init__(folder, models, model, blocks=blocks, drafters=drafters)

    async def meet(self) -> None:
        """Returns when the two sides know each other: NixlConnector gives that 5 s, too few on a busy machine."""
        while True:
            with contextlib.suppress(HttpError):
                await self.complete([2, 3], 1)
                return

    def connector(self, side: str) -> dict[str, Any]:
        """The same on both sides."""
        return {"kv_connector": "NixlConnector", "kv_buffer_device": "cpu", "kv_connector_extra_config": self._extra}
