"""The decode side of a request between SGLang's engine and the transfers' thread: SGLang's classes, and no server."""

import threading
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvd.client import Done
from kvd.engines.sglang.consumer import Consumer
from kvd.engines.sglang.handoff import checksum
from kvd.engines.sglang.messages import Message, Offered
from tests.engines.sglang.test_sglang_consumer import Client
from tests.sglang.testbed.absent import stand_in

pytestmark = pytest.mark.filterwarnings("ignore")  # SGLang's imports warn

ROOM = 7
PREFILL = "prefill:8998"


class Engine:
    """A manager without SGLang's sockets, and one receiver; the calls of the transfers' thread are made by `run`."""

    def __init__(self) -> None:
        stand_in()
        from sglang.srt.disaggregation.base.conn import KVPoll  # noqa: PLC0415 - after the stand-ins

        from kvd.engines.sglang.manager import KvdManager, KvdReceiver  # noqa: PLC0415 - imports SGLang

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
            tell=lambda _host, _port, message: self.told.append(message),
            landed=lambda room, *_: manager.update_status(room, KVPoll.Success),
            _deferred_ack_targets={},
            _deferred_ack_poisoned_rooms=set(),
            _staging_outstanding={},
        )
        self.told: list[Message] = []
        self.client = Client()
        self.consumer = manager.consumer = Consumer(self.client, manager, "decode", 5, pull_timeout=1.0)
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
        self.consumer.told(Offered(ROOM, self.told[0].nonce, "ticket", checksum([])))
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
