"""The two sides of a request, as SGLang asks for them: a sender where it is prefilled, a receiver where it is decoded.

SGLang frees a request's pages when `poll` says `Failed` or `Success`. So neither is said before the transfers' thread
has said it: what is aborted is polled as `Transferring` until nothing reads or writes its pages any more.
"""

import itertools
import time
from functools import cached_property
from typing import Any

import torch.distributed as dist
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVReceiver, CommonKVSender, KVTransferError
from sglang.srt.disaggregation.utils import all_reduce_flags

from kvd.client import Blocks
from kvd.engines.identity import checksum
from kvd.engines.kernels import Event
from kvd.engines.sglang.bootstrap import KvdBootstrapServer
from kvd.engines.sglang.handoff import HANDED, Handoff, check, read
from kvd.engines.sglang.manager import KvdManager
from kvd.engines.sglang.spec import PAGES
from kvd.errors import BadRequest

_ABORTED = "Aborted by AbortReq."
_ELSEWHERE = "another rank of this engine has failed it"


def room_of(mgr: KvdManager, wanted: int) -> int:
    """The room of a request; if another request has that, one that no other has, where this one fails at once.

    SGLang keeps what it knows of a request by its room. Of two in one room it would free the pages of both when either
    has failed, and what becomes of the first is a state in which it does not expect the second.
    """
    if wanted not in mgr.request_status:
        return wanted
    room = next(number for number in itertools.count(-1, -1) if number not in mgr.request_status)
    mgr.update_status(room, KVPoll.Bootstrapping)
    mgr.failed(room, f"another request has the bootstrap_room {wanted}")
    return room


class KvdSender(CommonKVSender):  # type: ignore[misc]
    """The prefill side of a request."""

    conclude_state: int | None
    _early_send_wait_event: Event | None

    def __init__(
        self, mgr: KvdManager, bootstrap_addr: str, bootstrap_room: int, req_has_disagg_prefill_dp_rank: bool = False
    ) -> None:
        room = room_of(mgr, bootstrap_room)
        super().__init__(mgr, bootstrap_addr, room, req_has_disagg_prefill_dp_rank)
        self._pages: list[int] = []
        self._prefix = 0
        self._tokens = 0
        self._sent = False
        self._reason = ""
        """Why it has failed, if it was aborted and its room is not its own any more."""
        self.prompt: list[int] = []
        """Its tokens (`kvd.engines.sglang.plugin` sets them)."""
        if room == bootstrap_room:
            mgr.call(mgr.producer.expect, room)
        else:
            self.conclude_state = KVPoll.Failed

    def pop_decode_prefix_len(self) -> int:
        """Tokens that the decode side has; 0 if it cannot have so many, and then the request fails."""
        prefix, page = int(super().pop_decode_prefix_len()), self.kv_mgr.kv_args.page_size
        if prefix > len(self.prompt) or prefix % page:  # SGLang would never send the last chunk, nor give it up
            text = f"the decode engine says that it has {prefix} tokens of a prompt of {len(self.prompt)}"
            self.kv_mgr.call(self.kv_mgr.producer.abandon, self.bootstrap_room, f"{text}; a page has {page}")
            prefix = 0
        self._prefix = prefix
        return prefix

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        """The request is about to be computed: so many pages will be sent."""
        super().init(num_kv_indices, aux_index)
        self._pages, self._tokens = [], self._prefix

    def send(self, kv_indices: Any, state_indices: Any = None, num_kv_tokens: int | None = None) -> None:
        """These pages, of so many tokens, are computed: they are offered, and with the last ones what goes beside."""
        if self.conclude_state is not None:
            return
        self._pages += kv_indices.tolist()
        self._tokens += num_kv_tokens or 0
        self._record_transfer_indices(kv_indices, state_indices)
        computing, self._early_send_wait_event = self._early_send_wait_event, None
        producer, room, first = self.kv_mgr.producer, self.bootstrap_room, self._prefix // self.kv_mgr.kv_args.page_size
        if len(self._pages) == self.num_kv_indices:
            self._sent = True
            prompt = checksum(self.prompt[: self._tokens])
            self.kv_mgr.call(
                producer.send,
                room,
                self._pages,
                tokens=self._tokens,
                first=first,
                aux_index=self.aux_index,
                prompt=prompt,
            )
            return
        self.kv_mgr.call(producer.begin, room, self._whole)
        if computing is None or computing.query():  # else an earlier step still writes them: they go with the next
            self.kv_mgr.call(producer.extend, room, [*self._pages], tokens=self._tokens, first=first)

    @cached_property
    def _whole(self) -> int:
        """The checksum of the whole prompt."""
        return checksum(self.prompt)

    def abort(self) -> None:
        """The engine gives the request up. SGLang need not clear what is aborted: the room is another request's then.

        Its pages are read as valid until its offer has ended, so what was sent keeps its room until it is polled.
        """
        if self.conclude_state == KVPoll.Success or self._reason:
            return
        if self._sent and self.conclude_state is None:
            self.kv_mgr.call(self.kv_mgr.producer.abandon, self.bootstrap_room, _ABORTED)
            return
        self.conclude_state = KVPoll.Failed
        with self.kv_mgr.failure_lock:
            self.kv_mgr.request_status.pop(self.bootstrap_room, None)
            self._reason = self.kv_mgr.failure_records.pop(self.bootstrap_room, _ABORTED)
        super().clear()
        self.kv_mgr.call(self.kv_mgr.producer.forget, self.bootstrap_room, self._reason)

    def give_up(self) -> bool:
        """Another rank of this engine has failed the request: whether its pages may be read as valid still."""
        if self.poll() in (KVPoll.Success, KVPoll.Failed):
            return False
        self.kv_mgr.call(self.kv_mgr.producer.abandon, self.bootstrap_room, _ELSEWHERE)
        return self._sent

    def failure_exception(self) -> None:
        """Says why it has failed.

        Raises:
            KVTransferError: always.

        """
        if self._reason:
            raise KVTransferError(self.bootstrap_room, self._reason)
        super().failure_exception()

    def clear(self) -> None:
        """The engine has no such request any more."""
        if self._reason:  # another request may have its room
            return
        with self.kv_mgr.failure_lock:  # the transfers' thread may be about to find the room in use
            super().clear()
        self.kv_mgr.call(self.kv_mgr.producer.forget, self.bootstrap_room)


class KvdReceiver(CommonKVReceiver):  # type: ignore[misc]
    """The decode side of a request."""

    conclude_state: int | None
    _wants = False
    _aborted = False
    _prompt = 0
    _handoff: Handoff | None = None

    def __init__(self, mgr: KvdManager, bootstrap_addr: str, bootstrap_room: int) -> None:
        room = room_of(mgr, bootstrap_room)
        super().__init__(mgr, bootstrap_addr, room)
        if room != bootstrap_room:
            self.conclude_state = KVPoll.Failed

    def expect(self, prompt: list[int], host: str | None, vocabulary: int) -> None:
        """The tokens of the request, and where it is to be found: `kvd.engines.sglang.plugin` calls this first."""
        self._prompt = checksum(prompt)
        self.kv_mgr.vocabulary = vocabulary
        if self.bootstrap_addr.startswith(HANDED) and self.conclude_state is None:
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
            self.kv_mgr.call(self.kv_mgr.consumer.let_go, self.bootstrap_room, self._handoff.params.kvd_ticket)

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
        ranks = tuple((rank["rank_ip"], int(rank["rank_port"])) for rank in self.bootstrap_infos)
        self.kv_mgr.call(
            consumer.want, room, ranks, blocks, prefix=prefix, aux_index=aux_index, prompt=self._prompt, after=after
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

    def give_up(self) -> bool:
        """Another rank of this engine has failed the request: whether its pages may be written to still."""
        if self.poll() in (KVPoll.Success, KVPoll.Failed) or not self._wants:
            return False
        self._abandon(_ELSEWHERE)
        return True

    def ensure_abort_notified(self, *, force_arm: bool = False) -> None:
        """Nothing: the transfers' thread tells the prefill engine, and has waited for the last write."""

    def clear(self) -> None:
        """The engine has no such request any more."""
        if self._handoff is not None and not self._wants and self.conclude_state is None:
            self.kv_mgr.call(self.kv_mgr.consumer.let_go, self.bootstrap_room, self._handoff.params.kvd_ticket)
        with self.kv_mgr.failure_lock:  # as of a sender
            super().clear()
        self.kv_mgr.call(self.kv_mgr.consumer.forget, self.bootstrap_room)


def polled_together(polls: list[int], pollers: list[Any], group: Any) -> list[int]:
    """What the ranks of `group` take their requests for, of the least that any of them has polled of each.

    SGLang frees the pages of a request on all ranks when one polls `Failed`. Those where pulls or offers go on give up,
    and until the last of these has ended the request is `Transferring` on all.
    """
    failed = [number for number, poll in enumerate(polls) if poll == KVPoll.Failed]
    busy = [int(hasattr(pollers[number], "give_up") and pollers[number].give_up()) for number in failed]
    for number, waits in zip(failed, all_reduce_flags(flags=busy, group=group, op=dist.ReduceOp.MAX), strict=True):
        if waits:
            polls[number] = KVPoll.Transferring
    return polls


CLASSES = {
    "manager": KvdManager,
    "sender": KvdSender,
    "receiver": KvdReceiver,
    "bootstrap_server": KvdBootstrapServer,
}
"""By SGLang's names of their kinds."""
