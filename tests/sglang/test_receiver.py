"""The decode side of a request between SGLang's engine and the transfers' thread: SGLang's classes, and no server."""

import threading
from collections import defaultdict
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvd.client import Cancelled, Done, Freed
from kvd.engines.identity import checksum
from kvd.engines.sglang.consumer import Consumer
from kvd.engines.sglang.handoff import HANDED, Handoff, Params
from kvd.engines.sglang.messages import Message, Offered
from tests.engines.sglang.test_sglang_consumer import TICKET, Client
from tests.sglang.testbed.absent import stand_in

pytestmark = pytest.mark.filterwarnings("ignore")  # SGLang's imports warn

ROOM = 7
PREFILL = "prefill:8998"


class Engine:
    """A manager without SGLang's sockets, and one receiver; the calls of the transfers' thread are made by `run`."""

    def __init__(self) -> None:
        stand_in()
        from sglang.srt.disaggregation.base.conn import KVPoll  # noqa: PLC0415 - after the stand-ins

        from kvd.engines.sglang.manager import KvdManager  # noqa: PLC0415 - imports SGLang
        from kvd.engines.sglang.sides import KvdReceiver  # noqa: PLC0415 - imports SGLang

        self.states = KVPoll
        self.manager = manager = object.__new__(KvdManager)
        vars(manager).update(
            request_status={},
            failure_records={},
            failure_lock=threading.Lock(),
            connection_lock=threading.Lock(),
            connection_pool={},
            prefill_info_table={},
            heartbeat_failures={},
            addr_to_rooms_tracker=defaultdict(set),
            prefill_response_tracker={},
            required_prefill_response_num_table={},
            deferred_bootstrap=None,
            defer_decode_allocation=False,
            waiting_timeout=300,
            kv_args=SimpleNamespace(page_size=1),
            kernels=lambda: None,
            call=self._call,
            tell=lambda _engine, message: self.told.append(message),
            landed=lambda room, *_: manager.update_status(room, KVPoll.Success),
            _deferred_ack_targets={},
            _deferred_ack_poisoned_rooms=set(),
            _staging_outstanding={},
        )
        self.told: list[Message] = []
        self.client = Client()
        manager.cancel = self.client.cancel
        self.consumer = manager.consumer = Consumer(
            self.client, manager, "decode", 5, pull_timeout=1.0, growing_timeout=9.0
        )
        self._calls: list[Any] = []
        self.receiver = KvdReceiver(manager, PREFILL, ROOM)
        self.receiver.bootstrap_infos = [{"rank_ip": "prefill", "rank_port": 4}]
        manager.update_status(ROOM, KVPoll.WaitingForInput)

    def _call(self, function: Any, *args: Any, **kwargs: Any) -> None:
        self._calls.append(lambda: function(*args, **kwargs))

    def run(self) -> None:
        calls, self._calls = self._calls, []
        for call in calls:
            call()

    def want(self) -> None:
        self.receiver.send_metadata(np.array([3, 4]), aux_index=1)
        self.run()

    def land(self) -> None:
        self.want()
        self.consumer.told(Offered(ROOM, self.told[0].nonce, TICKET, checksum([])))
        self.consumer.on_event(Done(self.client.name))


@pytest.fixture
def engine() -> Engine:
    return Engine()


def test_what_has_landed_is_polled_as_success(engine: Engine) -> None:
    engine.land()
    assert engine.receiver.poll() == engine.states.Success


@pytest.mark.parametrize("heard", [False, True])
def test_a_request_that_is_aborted_when_its_cache_has_just_landed_has_failed(engine: Engine, heard: bool) -> None:
    engine.land()
    engine.receiver.abort()
    if heard:
        engine.run()
    assert engine.receiver.poll() == engine.states.Failed
    with pytest.raises(Exception, match="Aborted"):
        engine.receiver.failure_exception()
    engine.run()
    assert (engine.manager.request_status, engine.manager.failure_records) == ({}, {})


def test_a_request_that_waits_for_memory_fails_when_its_prefill_server_is_lost(engine: Engine) -> None:
    engine.manager._handle_node_failure(PREFILL)
    engine.run()
    assert engine.receiver.poll() == engine.states.Failed
    engine.want()
    assert engine.told == []


def test_a_handoff_of_a_request_that_the_engine_drops_before_it_has_pages_is_let_go(engine: Engine) -> None:
    engine.receiver._handoff = Handoff(Params(TICKET, 0))
    engine.receiver.clear()
    engine.run()
    assert list(engine.client.pulls.values()) == [()]


def test_a_room_that_is_wanted_when_its_request_to_prefill_is_over_can_be_had_again(engine: Engine) -> None:
    from kvd.engines.sglang.sides import room_of  # noqa: PLC0415 - imports SGLang

    engine.manager.req_to_decode_prefix_len = {}
    engine.manager.ready(8, 3)
    assert room_of(engine.manager, 8) == 8
    assert engine.manager.req_to_decode_prefix_len == {}


@pytest.mark.parametrize("end", ["abort", "clear", "failure_exception"])
@pytest.mark.parametrize("first", ["waits", "is pulled", "has landed"])
def test_a_request_whose_room_another_one_has_fails_and_leaves_that_alone(engine: Engine, first: str, end: str) -> None:
    if first == "is pulled":
        engine.want()
        engine.consumer.told(Offered(ROOM, engine.told[0].nonce, TICKET, checksum([])))
    elif first == "has landed":
        engine.land()
    state = engine.manager.request_status[ROOM]
    second = type(engine.receiver)(engine.manager, f"{HANDED}:1", ROOM)
    second.expect([], "no handoff", 9)
    second.init(0)
    assert second.poll() == engine.states.Failed
    with pytest.raises(Exception, match="another request has the bootstrap_room 7") if "fail" in end else nullcontext():
        getattr(second, end)()
    second.clear()
    engine.run()
    assert engine.manager.request_status == {ROOM: state}
    assert engine.receiver.poll() == state
    assert engine.client.cancelled == []
    assert (len(engine.told), len(engine.client.pulls)) == {"waits": (0, 0)}.get(first, (1, 1))


@pytest.mark.parametrize("end", ["abort", "clear", "failure_exception"])
def test_a_request_to_prefill_whose_room_another_one_has_fails_and_leaves_that_alone(
    engine: Engine, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.disaggregation.common import conn  # noqa: PLC0415 - after the stand-ins

    from kvd.engines.sglang.sides import KvdSender  # noqa: PLC0415 - imports SGLang

    monkeypatch.setattr(conn, "get_parallel", lambda: SimpleNamespace(num_dp_ranks=1))
    heard = []
    engine.manager.producer = SimpleNamespace(
        **{name: lambda *said, _name=name: heard.append((_name, *said)) for name in ("expect", "abandon", "forget")}
    )
    vars(engine.manager).update(
        sender_trace_module=None, is_dummy_cp_rank=False, req_to_decode_prefix_len={ROOM: 3}, transfer_infos={}
    )
    vars(engine.manager).update(_maybe_ack_drained_abort=lambda _: None, _staging_ctx=None)
    del engine.manager.request_status[ROOM]
    first = KvdSender(engine.manager, PREFILL, ROOM)
    engine.manager.update_status(ROOM, engine.states.Transferring)
    second = KvdSender(engine.manager, PREFILL, ROOM)
    assert second.poll() == engine.states.Failed
    with pytest.raises(Exception, match="another request has the bootstrap_room 7") if "fail" in end else nullcontext():
        getattr(second, end)()
    second.clear()
    engine.run()
    assert first.poll() == engine.states.Transferring
    assert engine.manager.req_to_decode_prefix_len == {ROOM: 3}
    assert {said for said in heard if ROOM in said} == {("expect", ROOM)}
    engine.manager.sent(ROOM)
    assert first.poll() == engine.states.Success


@pytest.mark.parametrize("ended", [False, True])
def test_parts_go_to_offers_that_grow_whether_or_not_their_kernels_have_ended(engine: Engine, ended: bool) -> None:
    from kvd.engines.sglang.sides import KvdSender  # noqa: PLC0415 - imports SGLang

    sender, calls = object.__new__(KvdSender), []
    producer = SimpleNamespace(
        **{name: lambda *_, _name=name, **__: calls.append(_name) for name in ("begin", "extend", "send")}
    )
    engine.manager.producer = producer
    vars(sender).update(kv_mgr=engine.manager, bootstrap_room=ROOM, conclude_state=None, prompt=[1, 2, 3])
    vars(sender).update(_pages=[], _prefix=0, _tokens=0, _sent=False, num_kv_indices=3, aux_index=1)
    vars(sender).update(_transfer_num_kv_indices=0, _transfer_num_state_indices=0)
    sender._early_send_wait_event = SimpleNamespace(query=lambda: ended)
    sender.send(np.array([3, 4]), num_kv_tokens=2)
    sender.send(np.array([5]), num_kv_tokens=1)
    engine.run()
    assert calls == ["begin", *(["extend"] if ended else []), "send"]


def polled_of(engine: Engine) -> list[int]:
    """What this rank takes its request for when another one has failed it."""
    from kvd.engines.sglang.sides import polled_together  # noqa: PLC0415 - imports SGLang

    return polled_together([engine.states.Failed], [engine.receiver], None)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is one rank in the group."""
    monkeypatch.setattr("torch.distributed.get_world_size", lambda _: 1)


@pytest.mark.usefixtures("alone")
def test_pages_are_given_back_only_when_the_last_ranks_pull_has_ended_that_another_rank_has_failed(
    engine: Engine,
) -> None:
    engine.want()
    engine.consumer.told(Offered(ROOM, engine.told[0].nonce, TICKET, checksum([])))
    assert polled_of(engine) == [engine.states.Transferring]
    engine.run()
    assert engine.client.cancelled == [engine.client.name]
    assert polled_of(engine) == [engine.states.Transferring]
    engine.run()
    engine.consumer.on_event(Cancelled(engine.client.name, quarantined=True, blocks=()))
    assert polled_of(engine) == [engine.states.Transferring]
    engine.consumer.on_event(Freed(engine.client.name, blocks=()))
    assert polled_of(engine) == [engine.states.Failed]


@pytest.mark.usefixtures("alone")
def test_a_rank_that_waits_for_a_ticket_never_pulls_it_once_another_has_failed_the_request(engine: Engine) -> None:
    engine.want()
    assert polled_of(engine) == [engine.states.Transferring]
    engine.run()
    assert polled_of(engine) == [engine.states.Failed]
    engine.consumer.told(Offered(ROOM, engine.told[0].nonce, TICKET, checksum([])))
    assert not engine.client.pulls


@pytest.mark.usefixtures("alone")
def test_a_rank_that_has_not_given_pages_yet_keeps_nobody_waiting(engine: Engine) -> None:
    assert polled_of(engine) == [engine.states.Failed]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("sent", [False, True], ids=["computing", "offered"])
def test_pages_that_are_offered_stay_until_the_offer_has_ended_that_another_rank_has_failed(
    engine: Engine, sent: bool
) -> None:
    from kvd.engines.sglang.sides import KvdSender, polled_together  # noqa: PLC0415 - imports SGLang

    abandoned = []
    sender = object.__new__(KvdSender)
    vars(sender).update(kv_mgr=engine.manager, bootstrap_room=ROOM, conclude_state=None, _sent=sent)
    engine.manager.producer = SimpleNamespace(abandon=lambda room, _: abandoned.append(room))
    polled = polled_together([engine.states.Failed], [sender], None)
    assert polled == [engine.states.Transferring if sent else engine.states.Failed]
    engine.run()
    assert abandoned == [ROOM]
    engine.manager.failed(ROOM, "the offer has ended")
    vars(sender).update(trace_ctx=SimpleNamespace(trace_req_finish=lambda: None))
    assert polled_together([engine.states.Failed], [sender], None) == [engine.states.Failed]


def test_a_bootstrap_server_names_the_ranks_of_its_engine_in_their_order_once_all_are_there() -> None:
    stand_in()
    from sglang.srt.disaggregation.common.conn import PrefillRankInfo  # noqa: PLC0415 - after the stand-ins

    from kvd.engines.sglang.bootstrap import KvdBootstrapServer  # noqa: PLC0415 - imports SGLang

    server = object.__new__(KvdBootstrapServer)
    ranks = {number: {0: PrefillRankInfo("prefill", 5 + number)} for number in (1, 0)}
    vars(server).update(dp_size=1, attn_cp_size=1, attn_tp_size=2, pp_size=1)
    vars(server).update(prefill_port_table={0: {0: ranks}}, _registered_count=1)
    assert server._engine() == ()
    server._registered_count = 2
    assert server._engine() == (("prefill", 5), ("prefill", 6))
