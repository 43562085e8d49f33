"""The manager that SGLang asks for, one for a worker: it stands between the engine and the transfers' thread.

How a decode engine finds the prefill engine that has a room, and its health, are those of SGLang's common class.
"""

import logging
from typing import Any

import requests
import torch
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVManager
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_disagg

from kvd.engines.kernels import Event, record
from kvd.engines.sglang import memory
from kvd.engines.sglang.consumer import Consumer
from kvd.engines.sglang.control import Outbox
from kvd.engines.sglang.handoff import FirstToken
from kvd.engines.sglang.messages import Address, Message
from kvd.engines.sglang.metadata import Metadata
from kvd.engines.sglang.producer import Producer
from kvd.errors import ErrorCode, Unavailable, refusal
from kvd.limits import MAX_PULL_TIMEOUT

logger = logging.getLogger(__name__)

_RANK_0 = {"prefill_dp_rank": 0, "prefill_cp_rank": 0, "target_tp_rank": 0, "target_pp_rank": 0}
_ROUTE_SECONDS = 3.0


class KvdManager(CommonKVManager):  # type: ignore[misc]
    """A worker's session with its daemon."""

    forward_stream: Any = None
    vocabulary = 0
    """Tokens of the model, once a decode engine has a request."""

    def __init__(
        self, args: Any, disaggregation_mode: Any, server_args: Any, is_mla_backend: bool | None = False
    ) -> None:
        self._attached = memory.attached()
        self._metadata = Metadata(args, checksums=get_disagg().disaggregation_enable_kv_checksum)
        _check(args, self._attached, self._metadata)
        super().__init__(args, disaggregation_mode, server_args, is_mla_backend)
        self._outbox = Outbox(self._zmq_ctx)
        transfers, settings = self._attached.transfers, self._attached.settings
        self.call, self.call_after, self.cancel = transfers.call, transfers.call_after, transfers.cancel
        if disaggregation_mode is DisaggregationMode.PREFILL:
            self.producer = Producer(transfers.client, self, offer_ttl=settings.offer_ttl)
            transfers.serve(self.producer, self.server_socket)
        else:
            self.consumer = Consumer(
                transfers.client,
                self,
                self.local_ip,
                self.rank_port,
                pull_timeout=settings.pull_timeout,
                growing_timeout=min(MAX_PULL_TIMEOUT, settings.pull_timeout + self.waiting_timeout),
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
        with self.failure_lock:  # a sender that is aborted lets its room go under it
            if room in self.request_status:  # else it is over, and this would make it anew, for good
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
            token = self._metadata.unknown_token(aux_index, self.vocabulary)
            if token is not None:  # the engine would index with it, or its tokenizer
                self.failed(room, f"token {token} is not one of the {self.vocabulary} of this model")
        self.update_status(room, KVPoll.Success)

    def failed(self, room: int, reason: str) -> None:
        """It has failed; its pages are the engine's."""
        with self.failure_lock:  # a sender that is aborted lets its room go under it
            if room in self.request_status:
                self.failure_records.setdefault(room, reason)
                self.update_status(room, KVPoll.Failed)

    def fill(self, record: int, aux_index: int) -> None:
        """Copies what is at `aux_index` of the engine's metadata into a record."""
        self._metadata.copy_out(aux_index, self._record(record))

    def tell(self, engine: Address, message: Message) -> None:
        """Sends a message to another engine; what it does not get, it waits for until its time-out."""
        try:
            self._outbox.send(engine, message)
        except Unavailable as error:
            logger.warning("%s", error.text)

    # --- inside -----------------------------------------------------------------------------------------------------

    def _resolve_rank_mapping(self, info: Any) -> None:
        """A pull names all ranks of the prefill engine: which of them it reads, and what, daemons work out."""
        super()._resolve_rank_mapping(info)
        info.target_tp_ranks = list(range(info.attn_tp_size))

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


def _check(args: Any, attached: memory.Attached, metadata: Metadata) -> None:
    """Compares what SGLang wants to transfer with what the daemon was told."""
    if args.state_types:
        text = f"states beside the KV cache ({', '.join(kind.value for kind in args.state_types)})"
        raise refusal(ErrorCode.BAD_SPEC, f"{text} are not supported; serve this model without kvd")
    if envs.SGLANG_DISAGG_STAGING_BUFFER.get():
        text = "SGLANG_DISAGG_STAGING_BUFFER is set, which stages for SGLang's own backends; unset it beside kvd"
        raise refusal(ErrorCode.BAD_SPEC, text)
    if get_disagg().disaggregation_decode_allocation_policy == "prefill_complete":
        text = "--disaggregation-decode-allocation-policy prefill_complete: the backend kvd has decode engines reserve"
        raise refusal(ErrorCode.BAD_SPEC, f"{text} pages before a prefill is complete; leave the flag out")
    if metadata.record_bytes != attached.cache.record_bytes:
        text = f"{metadata.record_bytes} bytes go with a request beside its cache, {attached.cache.record_bytes} are "
        raise refusal(ErrorCode.BAD_SPEC, f"{text}expected: does a drafter hand on hidden states? Serve without it")
    base = attached.pool.data_ptr()
    half = attached.cache.layer_bytes // attached.cache.halves
    starts = sorted(pointer - base for pointer in args.kv_data_ptrs)
    if starts != [half * number for number in range(len(attached.cache.layers) * attached.cache.halves)]:
        text = f"SGLang's buffers begin at {starts} of the pool, declared was one every {half} bytes"
        raise refusal(ErrorCode.INTERNAL, text)
