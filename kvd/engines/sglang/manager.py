"""The classes that SGLang asks for: a manager for a worker, a sender or a receiver for a request.

SGLang frees a request's pages when `poll` says `Failed` or `Success`. So neither is said before the transfers' thread
has said it: what is aborted is polled as `Transferring` until nothing reads or writes its pages any more. They take
from SGLang's common classes how a decode engine finds the prefill engine that has a room, and its health.
"""

import logging
import time
from typing import Any

import requests
import torch
import zmq
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import (
    CommonKVManager,
    CommonKVReceiver,
    CommonKVSender,
)
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.runtime_context import get_disagg
from sglang.srt.utils.network import NetworkAddress

from kvd.client import Blocks
from kvd.engines.kernels import Event, record
from kvd.engines.sglang import memory
from kvd.engines.sglang.bootstrap import KvdBootstrapServer
from kvd.engines.sglang.consumer import Consumer
from kvd.engines.sglang.handoff import HANDED, FirstToken, Handoff, check, checksum, read
from kvd.engines.sglang.messages import Message, encode
from kvd.engines.sglang.metadata import Metadata
from kvd.engines.sglang.producer import Producer
from kvd.engines.sglang.spec import PAGES
from kvd.errors import BadRequest, ErrorCode, refusal

logger = logging.getLogger(__name__)

_ABORTED = "Aborted by AbortReq."

_RANK_0 = {"prefill_dp_rank": 0, "prefill_cp_rank": 0, "target_tp_rank": 0, "target_pp_rank": 0}
_ROUTE_SECONDS = 3.0


class KvdManager(CommonKVManager):  # type: ignore[misc]
    """A worker's session with its daemon."""

    forward_stream: Any = None

    def __init__(
        self, args: Any, disaggregation_mode: Any, server_args: Any, is_mla_backend: bool | None = False
    ) -> None:
        self._attached = memory.attached()
        self._metadata = Metadata(args, checksums=get_disagg().disaggregation_enable_kv_checksum)
        _check(args, self._attached, self._metadata)
        super().__init__(args, disaggregation_mode, server_args, is_mla_backend)
        transfers, settings = self._attached.transfers, self._attached.settings
        self.call, self.call_after = transfers.call, transfers.call_after
        if disaggregation_mode is DisaggregationMode.PREFILL:
            self.producer = Producer(transfers.client, self, offer_ttl=settings.offer_ttl)
            transfers.serve(self.producer, self.server_socket)
        else:
            self.consumer = Consumer(
                transfers.client, self, self.local_ip, self.rank_port, pull_timeout=settings.pull_timeout
            )
            transfers.serve(self.consumer, self.server_socket)
            self._start_heartbeat_checker_thread()

    def kernels(self) -> Event | None:
        """What the engine has given to its GPU until now; None on a CPU, which has done it.

        With overlap scheduling it gives a request's pages to the next one while a step that it launched before still
        runs, and writes one more token to them. `kvd.engines.sglang.plugin` says on which stream.
        """
        return record(self.forward_stream) if self._attached.pool.is_cuda else None

    # --- the transfers' thread tells ----------------------------------------------------------------------------------

    def ready(self, room: int, prefix: int) -> None:
        """The decode side wants it, but for its first tokens."""
        self.req_to_decode_prefix_len[room] = prefix
        self.update_status(room, KVPoll.WaitingForInput)

    def sent(self, room: int) -> None:
        """The decode side has it."""
        self.update_status(room, KVPoll.Success)

    def pulling(self, room: int) -> None:
        """Its pages may be written to from now on."""
        self.update_status(room, KVPoll.Transferring)

    def landed(self, room: int, record: int | FirstToken, aux_index: int) -> None:
        """Its pages are there."""
        if isinstance(record, FirstToken):
            self._metadata.write(aux_index, room, record)
        else:
            self._metadata.copy_in(aux_index, self._record(record))
        self.update_status(room, KVPoll.Success)

    def failed(self, room: int, reason: str) -> None:
        """It has failed; its pages are the engine's."""
        if room in self.request_status:
            with self.failure_lock:
                self.failure_records.setdefault(room, reason)
            self.update_status(room, KVPoll.Failed)

    def fill(self, record: int, aux_index: int) -> None:
        """Copies what is at `aux_index` of the engine's metadata into a record."""
        self._metadata.copy_out(aux_index, self._record(record))

    def tell(self, host: str, port: int, message: Message) -> None:
        """Sends a message to another engine; what it does not get, it waits for until its time-out."""
        address = NetworkAddress(host, port)
        try:
            self._connect(address.to_tcp(), is_ipv6=address.is_ipv6).send(encode(message), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            logger.warning("%r cannot be sent to the engine at %s:%s: %s", message, host, port, error)

    # --- inside -----------------------------------------------------------------------------------------------------

    def _record(self, number: int) -> torch.Tensor:
        return self._attached.pool[self._attached.cache.record(number)]

    def _on_heartbeat_success(self, bootstrap_addr: str) -> None:
        """The bootstrap server lives: its engine may be another one than that which decode requests know.

        A server that is started again within two heartbeats would not be missed, and what is sent to its predecessor's
        socket would never be answered.
        """
        with self.connection_lock:
            known = [
                (info["rank_ip"], int(info["rank_port"]))
                for key, infos in self.connection_pool.items()
                if key.startswith(f"{bootstrap_addr}_")
                for info in infos
            ]
        if not known:
            return
        try:
            response = requests.get(f"http://{bootstrap_addr}/route", params=_RANK_0, timeout=_ROUTE_SECONDS)
            found = response.json() if response.ok else {}
        except (requests.RequestException, ValueError):
            return  # the next heartbeat tells
        if found and (found["rank_ip"], int(found["rank_port"])) not in known:
            self._handle_node_failure(bootstrap_addr)

    def _handle_node_failure(self, failed_bootstrap_addr: str) -> None:
        """The prefill engine is gone. What its daemon has can be pulled all the same."""
        with self.connection_lock:
            rooms = self.addr_to_rooms_tracker.pop(failed_bootstrap_addr, set())
        super()._handle_node_failure(failed_bootstrap_addr)
        for room in rooms:
            self.call(self._lost, room, f"the prefill engine at {failed_bootstrap_addr} does not answer")

    def _lost(self, room: int, reason: str) -> None:
        if room in self.request_status:  # else it is over
            self.consumer.lost(room, reason)


class KvdSender(CommonKVSender):  # type: ignore[misc]
    """The prefill side of a request."""

    conclude_state: int | None

    def __init__(
        self, mgr: KvdManager, bootstrap_addr: str, bootstrap_room: int, req_has_disagg_prefill_dp_rank: bool = False
    ) -> None:
        super().__init__(mgr, bootstrap_addr, bootstrap_room, req_has_disagg_prefill_dp_rank)
        self._pages: list[int] = []
        self._prefix = 0
        self._tokens = 0
        self._sent = False
        self.prompt: list[int] = []
        """Its tokens (`kvd.engines.sglang.plugin` sets them)."""
        mgr.call(mgr.producer.expect, bootstrap_room)

    def pop_decode_prefix_len(self) -> int:
        """Tokens that the decode side has."""
        self._prefix = int(super().pop_decode_prefix_len())
        return self._prefix

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        """The request is about to be computed: so many pages will be sent."""
        super().init(num_kv_indices, aux_index)
        self._pages, self._tokens = [], self._prefix

    def send(self, kv_indices: Any, state_indices: Any = None, num_kv_tokens: int | None = None) -> None:
        """These pages, of so many tokens, are computed; with the last ones, all are offered."""
        if self.conclude_state is not None:
            return
        self._pages += kv_indices.tolist()
        self._tokens += num_kv_tokens or 0
        self._record_transfer_indices(kv_indices, state_indices)
        if len(self._pages) == self.num_kv_indices:
            self._sent = True
            first = self._prefix // self.kv_mgr.kv_args.page_size
            self.kv_mgr.call(
                self.kv_mgr.producer.send,
                self.bootstrap_room,
                self._pages,
                tokens=self._tokens,
                first=first,
                aux_index=self.aux_index,
                prompt=checksum(self.prompt[: self._tokens]),
            )

    def abort(self) -> None:
        """The engine gives the request up."""
        if self.conclude_state is not None:
            return
        self.kv_mgr.record_failure(self.bootstrap_room, _ABORTED)
        self.kv_mgr.call(self.kv_mgr.producer.abandon, self.bootstrap_room, _ABORTED)
        if not self._sent:
            self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Failed)
            self.conclude_state = KVPoll.Failed
            self.kv_mgr.call(self.kv_mgr.producer.forget, self.bootstrap_room)  # SGLang need not clear what is aborted

    def clear(self) -> None:
        """The engine has no such request any more."""
        super().clear()
        self.kv_mgr.call(self.kv_mgr.producer.forget, self.bootstrap_room)


class KvdReceiver(CommonKVReceiver):  # type: ignore[misc]
    """The decode side of a request."""

    conclude_state: int | None
    _wants = False
    _aborted = False
    _prompt = 0
    _handoff: Handoff | None = None

    def expect(self, prompt: list[int], host: str | None, vocabulary: int) -> None:
        """The tokens of the request, and where it is to be found: `kvd.engines.sglang.plugin` calls this first."""
        self._prompt = checksum(prompt)
        if self.bootstrap_addr.startswith(HANDED):
            try:
                self._handoff = read(host or "")
                check(self._handoff, prompt, vocabulary)
            except BadRequest as error:
                self._refuse(error.text)

    def init(self, prefill_dp_rank: int) -> None:
        """Finds the prefill server."""
        if self._handoff is None:
            super().init(prefill_dp_rank)
        elif self.conclude_state is None:
            self.bootstrap_infos: list[dict[str, Any]] = []
            self.kv_mgr.update_status(self.bootstrap_room, KVPoll.WaitingForInput)

    def _refuse(self, reason: str) -> None:
        """Fails before it has pages."""
        self.kv_mgr.record_failure(self.bootstrap_room, reason)
        self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Failed)
        self.conclude_state = KVPoll.Failed
        if self._handoff is not None:
            self.kv_mgr.call(self.kv_mgr.consumer.let_go, self.bootstrap_room, self._handoff)

    def _register_kv_args(self) -> bool:
        """Nothing is registered: daemons know each other's layouts."""
        return self.bootstrap_infos is not None

    def send_metadata(
        self,
        kv_indices: Any,
        aux_index: int | None = None,
        state_indices: Any = None,
        decode_prefix_len: int | None = None,
        **others: Any,
    ) -> None:
        """The engine has these pages for what follows the first `decode_prefix_len` tokens."""
        del state_indices, others  # there are no states; the pages are the pool's
        if self.bootstrap_infos is None:
            self.abort()
            return
        prefix, pages = decode_prefix_len or 0, kv_indices.tolist()
        blocks = (Blocks(PAGES, prefix // self.kv_mgr.kv_args.page_size, pages),) if pages else ()
        self._wants, self.init_time = True, time.time()
        consumer, room, after = self.kv_mgr.consumer, self.bootstrap_room, self.kv_mgr.kernels()
        if self._handoff is not None:
            self.kv_mgr.call(consumer.take, room, self._handoff, blocks, aux_index=aux_index, after=after)
            return
        (source,) = self.bootstrap_infos
        place = source["rank_ip"], int(source["rank_port"])
        self.kv_mgr.call(
            consumer.want, room, place, blocks, prefix=prefix, aux_index=aux_index, prompt=self._prompt, after=after
        )

    def poll(self) -> Any:
        """What landed for a request that was aborted is not the request's: nothing writes to its pages any more."""
        state = super().poll()
        if self._aborted and state == KVPoll.Success:
            self.conclude_state = state = KVPoll.Failed
        return state

    def _check_waiting_timeout(self) -> Any:
        """Gives up a request whose ticket does not come. Its failure comes from the transfers' thread."""
        if self.init_time is not None and time.time() - self.init_time >= self.kv_mgr.waiting_timeout:
            self._abandon(f"no ticket came within {self.kv_mgr.waiting_timeout} s")

    def _abandon(self, reason: str) -> None:
        self.kv_mgr.call(self.kv_mgr.consumer.abandon, self.bootstrap_room, reason)

    def abort(self) -> None:
        """The engine gives the request up."""
        if self.conclude_state is not None:
            return
        self._aborted = True
        if self._wants:
            self.kv_mgr.record_failure(self.bootstrap_room, _ABORTED)
        else:
            self._refuse(_ABORTED)
        self._abandon(_ABORTED)

    def ensure_abort_notified(self, *, force_arm: bool = False) -> None:
        """Nothing: the transfers' thread tells the prefill engine, and has waited for the last write."""

    def clear(self) -> None:
        """The engine has no such request any more."""
        super().clear()
        self.kv_mgr.call(self.kv_mgr.consumer.forget, self.bootstrap_room)


CLASSES = {
    "manager": KvdManager,
    "sender": KvdSender,
    "receiver": KvdReceiver,
    "bootstrap_server": KvdBootstrapServer,
}
"""By SGLang's names of their kinds."""


def _check(args: Any, attached: memory.Attached, metadata: Metadata) -> None:
    """Compares what SGLang wants to transfer with what the daemon was told."""
    if args.state_types:
        text = f"states beside the KV cache ({', '.join(kind.value for kind in args.state_types)})"
        raise refusal(ErrorCode.BAD_SPEC, f"{text} are not supported; serve this model without kvd")
    if metadata.record_bytes != attached.cache.record_bytes:
        text = f"{metadata.record_bytes} bytes go with a request beside its cache, {attached.cache.record_bytes} are "
        raise refusal(ErrorCode.BAD_SPEC, f"{text}expected: does a drafter hand on hidden states? Serve without it")
    base = attached.pool.data_ptr()
    half = attached.cache.layer_bytes // attached.cache.halves
    starts = sorted(pointer - base for pointer in args.kv_data_ptrs)
    if starts != [half * number for number in range(len(attached.cache.layers) * attached.cache.halves)]:
        text = f"SGLang's buffers begin at {starts} of the pool, declared was one every {half} bytes"
        raise refusal(ErrorCode.INTERNAL, text)
