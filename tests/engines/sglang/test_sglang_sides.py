"""The prefill side of a request and the manager, over stand-ins for the classes of SGLang that they extend."""

import importlib
import sys
import threading
from collections.abc import Iterator
from enum import IntEnum
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import zmq

from kvd.client import Released
from kvd.engines.sglang.control import Outbox
from kvd.engines.sglang.messages import Offered, Refused, Wanted
from kvd.engines.sglang.metadata import Metadata
from kvd.engines.sglang.producer import Producer
from kvd.errors import BadRequest
from tests.engines.sglang.test_sglang_producer import Client

ROOM = 7
PROMPT = list(range(100))
PAGE = 16
NONCE = b"n" * 16
METADATA_BUFFERS = 7
"""SGLang's first six, the last of them the likeliest tokens, and the room's."""


class KVPoll(IntEnum):
    Failed, Bootstrapping, WaitingForInput, Transferring, Success = range(5)


class KVTransferError(Exception):
    def __init__(self, room: int, reason: str) -> None:
        super().__init__(reason)


class CommonKVManager:
    def __init__(self) -> None:
        self.request_status: dict[int, KVPoll] = {}
        self.failure_records: dict[int, str] = {}
        self.failure_lock = threading.Lock()
        self.req_to_decode_prefix_len: dict[int, int] = {}
        self.kv_args = SimpleNamespace(page_size=PAGE)

    def update_status(self, room: int, status: KVPoll) -> None:
        known = self.request_status.get(room)
        if known is None and status not in (KVPoll.Bootstrapping, KVPoll.WaitingForInput):
            return
        if known != KVPoll.Failed:
            self.request_status[room] = status if known is None or status == KVPoll.Failed else max(known, status)

    def record_failure(self, room: int, reason: str) -> None:
        self.failure_records[room] = reason


class CommonKVSender:
    _early_send_wait_event = None

    def __init__(self, mgr: Any, _addr: str, room: int, _rank: bool) -> None:
        self.kv_mgr, self.bootstrap_room, self.conclude_state = mgr, room, None
        mgr.update_status(room, KVPoll.Bootstrapping)

    def init(self, num_kv_indices: int, aux_index: int | None) -> None:
        self.num_kv_indices, self.aux_index = num_kv_indices, aux_index

    def _record_transfer_indices(self, *_: Any) -> None: ...

    def pop_decode_prefix_len(self) -> int:
        return int(self.kv_mgr.req_to_decode_prefix_len.pop(self.bootstrap_room, 0))

    def poll(self) -> Any:
        if self.conclude_state is None:
            status = self.kv_mgr.request_status.get(self.bootstrap_room, KVPoll.Failed)
            if status not in (KVPoll.Success, KVPoll.Failed):
                return status
            self.conclude_state = status
        return self.conclude_state

    def clear(self) -> None:
        self.kv_mgr.request_status.pop(self.bootstrap_room, None)

    def failure_exception(self) -> None:
        self.conclude_state = KVPoll.Failed
        self.clear()
        raise KVTransferError(self.bootstrap_room, self.kv_mgr.failure_records.pop(self.bootstrap_room, "elsewhere"))


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """kvd's modules that import SGLang, by their names, and the stand-ins by theirs."""
    srt = "sglang.srt"
    names = ("sglang", srt, f"{srt}.disaggregation", f"{srt}.disaggregation.base", f"{srt}.disaggregation.base.conn")
    names += (f"{srt}.disaggregation.common", f"{srt}.disaggregation.common.conn", f"{srt}.disaggregation.utils")
    names += (f"{srt}.environ", f"{srt}.runtime_context", f"{srt}.utils", f"{srt}.utils.network")
    modules: dict[str, Any] = {}
    for name in names:
        modules[name] = MagicMock(spec=ModuleType(name), __path__=[], __version__="0.5.23")
        monkeypatch.setitem(sys.modules, name, modules[name])
    common = modules[f"{srt}.disaggregation.common.conn"]
    common.CommonKVManager, common.CommonKVSender, common.CommonKVReceiver = CommonKVManager, CommonKVSender, object
    common.CommonKVBootstrapServer, common.KVTransferError = object, KVTransferError
    modules[f"{srt}.disaggregation.base.conn"].KVPoll = KVPoll
    utils, context = modules[f"{srt}.disaggregation.utils"], modules[f"{srt}.runtime_context"]
    utils.all_reduce_flags, utils.DisaggregationMode, utils.MetadataBuffers = MagicMock(), MagicMock(), MagicMock()
    context.get_disagg, context.get_parallel = MagicMock(), MagicMock()
    modules[f"{srt}.environ"].envs = MagicMock()
    modules[f"{srt}.environ"].envs.SGLANG_DISAGG_STAGING_BUFFER.get.return_value = False
    modules[f"{srt}.utils.network"].NetworkAddress = MagicMock()
    ours = [f"kvd.engines.sglang.{name}" for name in ("bootstrap", "memory", "manager", "sides")]
    for name in ours:
        monkeypatch.delitem(sys.modules, name, raising=False)
    modules |= {name.rpartition(".")[2]: importlib.import_module(name) for name in ours}
    yield modules
    for name in ours:
        sys.modules.pop(name, None)


class Side:
    """A prefill engine; calls of the transfers' thread are made when `run` is called."""

    def __init__(self, sglang: dict[str, Any]) -> None:
        self._sender = sglang["sides"].KvdSender
        self.manager = object.__new__(sglang["manager"].KvdManager)
        CommonKVManager.__init__(self.manager)
        self.told: list[Any] = []
        self.calls: list[Any] = []
        self.client = Client()
        self.manager.call = lambda function, *args, **kwargs: self.calls.append(lambda: function(*args, **kwargs))
        self.manager.cancel = self.client.cancel
        self.manager.tell = lambda _engine, message: self.told.append(message)
        self.manager.fill = lambda *_: None
        self.manager.producer = Producer(self.client, self.manager, offer_ttl=1.0)

    def request(self, room: int = ROOM) -> Any:
        sender = self._sender(self.manager, "prefill:8998", room)
        sender.prompt = PROMPT
        return sender

    def run(self) -> None:
        while self.calls:
            self.calls.pop(0)()

    def wanted(self, prefix: int) -> Any:
        sender = self.request()
        self.run()
        self.manager.producer.told(Wanted(ROOM, NONCE, prefix, "decode", 5))
        assert sender.poll() == KVPoll.WaitingForInput
        return sender

    def send(self, sender: Any) -> None:
        prefix = sender.pop_decode_prefix_len()
        pages = -(-(len(PROMPT) - prefix) // PAGE)
        sender.init(pages, 3)
        sender.send(MagicMock(tolist=lambda: list(range(pages))), None, len(PROMPT) - prefix)
        self.run()


@pytest.fixture
def side(sglang: dict[str, Any]) -> Side:
    return Side(sglang)


def test_aborted_prefills_leave_nothing_and_their_rooms_may_come_again(side: Side) -> None:
    aborted = side.request()
    side.run()
    aborted.abort()
    assert (side.manager.request_status, side.manager.failure_records) == ({}, {})
    again = side.request()  # before the transfers' thread has heard of the first one's end
    assert again.bootstrap_room == ROOM
    side.run()
    for _ in range(2):
        assert aborted.poll() == KVPoll.Failed
        with pytest.raises(KVTransferError, match="Aborted by AbortReq"):
            aborted.failure_exception()
        aborted.abort()
        aborted.clear()
        side.run()
    assert again.poll() == KVPoll.Bootstrapping
    side.manager.producer.told(Wanted(ROOM, NONCE, 0, "decode", 5))
    assert again.poll() == KVPoll.WaitingForInput


def test_the_decode_side_hears_why_an_aborted_prefill_does_not_come(side: Side) -> None:
    side.wanted(0).abort()
    side.run()
    assert side.told == [Refused(ROOM, NONCE, "Aborted by AbortReq.")]


def test_a_prefill_that_has_failed_and_is_aborted_then_leaves_nothing_and_says_why_it_failed(side: Side) -> None:
    sender = side.wanted(0)
    side.manager.failed(ROOM, "no memory")
    assert sender.poll() == KVPoll.Failed
    sender.abort()
    assert (side.manager.request_status, side.manager.failure_records) == ({}, {})
    with pytest.raises(KVTransferError, match="no memory"):
        sender.failure_exception()


def test_a_request_in_a_room_that_another_one_has_leaves_nothing_when_it_is_aborted(side: Side) -> None:
    first, second = side.request(), side.request()
    assert second.poll() == KVPoll.Failed
    second.abort()
    side.run()
    assert (list(side.manager.request_status), side.manager.failure_records) == ([ROOM], {})
    assert first.poll() == KVPoll.Bootstrapping


def test_an_aborted_request_that_was_offered_keeps_its_room_until_its_offer_has_ended(side: Side) -> None:
    sender = side.wanted(0)
    side.send(sender)
    assert isinstance(side.told[-1], Offered)
    sender.abort()
    side.run()
    assert side.client.cancelled == [side.client.offer]
    assert sender.poll() == KVPoll.WaitingForInput
    side.manager.producer._ended(side.client.offer, "withdrawn")
    assert sender.poll() == KVPoll.Failed
    with pytest.raises(KVTransferError, match="Aborted by AbortReq"):
        sender.failure_exception()


@pytest.mark.parametrize("prefix", [112, 2**31 - 1, 17], ids=["beyond the prompt", "far beyond it", "no whole page"])
def test_a_prefix_that_no_decode_engine_can_have_fails_the_request_on_both_sides(side: Side, prefix: int) -> None:
    sender = side.wanted(prefix)
    side.send(sender)
    assert sender.poll() == KVPoll.Failed
    assert not side.client.offers
    (refused,) = side.told
    assert f"it has {prefix} tokens of a prompt of 100; a page has 16" in refused.reason
    with pytest.raises(KVTransferError, match=f"it has {prefix} tokens"):
        sender.failure_exception()


def test_a_prefix_of_whole_pages_is_not_sent(side: Side) -> None:
    sender = side.wanted(96)
    side.send(sender)
    pages, _ = side.client.offers[side.client.offer]
    assert (pages.first, len(pages.ids)) == (6, 1)


def record_of(buffer: int, place: int, token: int) -> torch.Tensor:
    """A record with this token there, and zeros beside it."""
    rows = torch.zeros((METADATA_BUFFERS, 16), dtype=torch.int32)
    rows[buffer, place] = token
    return rows.flatten().view(torch.int8)


@pytest.mark.parametrize(("buffer", "place"), [(0, 0), (3, 0), (5, 15)], ids=["first", "with logprob", "likeliest"])
@pytest.mark.parametrize(("token", "state"), [(9, KVPoll.Success), (10, KVPoll.Failed), (-1, KVPoll.Failed)])
def test_a_record_with_a_token_that_the_model_does_not_have_fails_its_request(
    side: Side, buffer: int, place: int, token: int, state: KVPoll
) -> None:
    manager, rows = side.manager, [torch.zeros((4, 16), dtype=torch.int32) for _ in range(METADATA_BUFFERS)]
    args = SimpleNamespace(
        aux_data_ptrs=[each.data_ptr() for each in rows],
        aux_data_lens=[each.nbytes for each in rows],
        aux_item_lens=[each[0].nbytes for each in rows],
    )
    manager.vocabulary = 10
    manager._metadata = Metadata(args, checksums=False)
    manager._record = lambda _: record_of(buffer, place, token)
    manager.update_status(ROOM, KVPoll.Bootstrapping)
    manager.landed(ROOM, 0, 3)
    assert rows[buffer][3, place] == token
    assert manager.request_status[ROOM] == state
    assert (f"token {token} is not one of the 10" in manager.failure_records.get(ROOM, "")) == (state == KVPoll.Failed)


def test_a_room_that_is_let_go_while_its_readiness_waits_is_not_made_anew(side: Side) -> None:
    class AfterItsAbort:
        """A lock that is had once the engine's thread has aborted the request."""

        def __enter__(self) -> None:
            side.manager.request_status.pop(ROOM)

        def __exit__(self, *_: object) -> None: ...

    side.manager.update_status(ROOM, KVPoll.Bootstrapping)
    side.manager.failure_lock = AfterItsAbort()
    side.manager.ready(ROOM, 0)
    assert (side.manager.request_status, side.manager.req_to_decode_prefix_len) == ({}, {})


def test_a_request_that_is_aborted_when_its_cache_was_just_read_leaves_nothing(side: Side) -> None:
    sender = side.wanted(0)
    side.send(sender)
    side.manager.producer.on_event(Released(side.client.offer, "read"))
    sender.abort()
    side.run()
    assert sender.poll() == KVPoll.Success
    sender.clear()
    side.run()
    assert (side.manager.request_status, side.manager.failure_records) == ({}, {})


@pytest.mark.parametrize(("policy", "refused"), [("prefill_complete", True), ("eager", False)])
def test_a_decode_server_that_would_reserve_pages_only_after_the_prefill_is_refused_at_its_start(
    sglang: dict[str, Any], policy: str, refused: bool
) -> None:
    manager = sglang["manager"]
    manager.get_disagg.return_value = SimpleNamespace(disaggregation_decode_allocation_policy=policy)
    attached = MagicMock(cache=MagicMock(record_bytes=16))
    text = "--disaggregation-decode-allocation-policy prefill_complete" if refused else "8 bytes go with a request"
    with pytest.raises(BadRequest, match=text):
        manager._check(SimpleNamespace(state_types=[]), attached, SimpleNamespace(record_bytes=8))


def test_a_message_that_cannot_be_sent_is_logged_and_ends_nothing(
    sglang: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    manager = object.__new__(sglang["manager"].KvdManager)
    with zmq.Context() as context:
        manager._outbox = Outbox(context)
        manager.tell(("no host", 5), Refused(ROOM, NONCE, "no memory"))
    assert "cannot be sent to the engine at no host:5" in caplog.text
