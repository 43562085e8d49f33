"""What answers say of where the engine's daemons are."""

import pytest

from kvd.engines.vllm.metadata import RankEndpoint
from kvd.engines.vllm.scheduler import SchedulerSide
from kvd.errors import InternalError
from kvd.layout import Full
from kvd.protocol.ticket import decode
from tests.engines.vllm import test_vllm_turns as turns
from tests.engines.vllm.blocks import Manager
from tests.engines.vllm.test_vllm_scheduler import prefilled, side


def test_tickets_of_the_step_name_a_daemon_that_was_started_during_it() -> None:
    producer = side()
    params = prefilled(producer, 9, [3, 1, 2])
    producer.set_endpoints({0: RankEndpoint("d0", "tcp://h:9", 8, "vllm-0")})
    assert params["kvd_producer"] == [{"daemon": "d0", "address": "tcp://h:9", "pool": "vllm-0"}]
    (rank,) = decode(params["kvd_ticket"]).ranks
    assert (rank.address, rank.incarnation) == ("tcp://h:9", 8)


def test_a_turn_names_a_daemon_that_was_started_in_its_step_in_the_ticket_alone() -> None:
    manager = Manager()
    engine = turns.side(manager)
    params = turns.decode_turn(engine, manager, turns.SEQUENCE, *turns.NINE, name=True)
    assert params is not None
    engine.set_endpoints({0: RankEndpoint("d0", "tcp://h:9", 8, "vllm-0")})
    (rank,) = decode(params["kvd_ticket"]).ranks
    assert (rank.address, rank.incarnation) == ("tcp://h:9", 8)
    assert "kvd_producer" not in params


def test_a_rank_without_a_known_daemon_is_an_error_that_says_so() -> None:
    producer = SchedulerSide(((Full(), 4),), 2)
    producer.set_endpoints({1: RankEndpoint("d1", "tcp://h:1", 7, "vllm-1")})
    with pytest.raises(InternalError, match=r"ranks \[1\]"):
        prefilled(producer, 9, [3, 1, 2])
