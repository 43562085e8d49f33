"""What counts of that which peers answer to our hellos."""

import pytest
from structlog.testing import capture_logs

from kvd.actors.runtime.actor import call
from kvd.errors import ErrorCode
from kvd.protocol.peer import Claim, Hello, Refuse
from kvd.protocol.types import VERSION
from tests.actors.stage import Stage, welcome_of


@pytest.fixture
def stage():
    stage = Stage(heartbeat=1.0)
    stage.attach()
    return stage


def test_a_peer_that_refuses_us_is_not_asked_as_fast_as_it_answers(stage):
    stage.pull(timeout=60.0)
    for _ in range(5):
        stage.peer_says(Refuse(0, ErrorCode.BAD_VERSION, "speaks\n9"))
    assert len(stage.asks(Hello)) == 1
    [failed] = stage.notified
    assert failed.code == ErrorCode.PEER_LOST
    assert "speaks?9" in failed.text
    stage.run(1.0)
    assert len(stage.asks(Hello)) == 2


def lost_and_logged(stage, replies):
    """How many losses of a peer its replies count for, and how many lines are logged."""
    with capture_logs() as logs:
        for reply in replies:
            stage.peer_says(reply)
    return stage.context.metrics.registry.get_sample_value("kvd_peers_lost_total"), len(logs)


def test_refusals_and_wrong_welcomes_count_once_for_each_hello(stage):
    """What follows a loss takes long beside thousands of pulls, and what is said of a peer is logged."""
    stage.pull(timeout=60.0)
    refusals = [Refuse(0, code, "no") for code in (ErrorCode.TRANSPORT, ErrorCode.BAD_VERSION)]
    assert lost_and_logged(stage, 25 * refusals) == (1.0, 1)
    stage.run(1.0)
    assert lost_and_logged(stage, 50 * [welcome_of(version=VERSION + 1)]) == (2.0, 1)
    stage.run(1.0)
    stage.peer_says(welcome_of())
    assert stage.actors.handshake.report()[0].state == "ready"


@pytest.mark.parametrize("loading", [False, True], ids=["ready", "loading"])
def test_refusals_after_the_welcome_answer_nothing_and_change_nothing(stage, loading):
    if loading:
        stage.dependencies.transport.add_peer = lambda *_: None
    stage.pull(timeout=60.0)
    for _ in range(5):
        stage.peer_says(welcome_of())
        stage.peer_says(Refuse(0, ErrorCode.BAD_VERSION, "speaks 9"))
    assert len(stage.asks(Hello)) == 1
    assert stage.notified == []
    assert stage.actors.handshake.report()[0].state == ("loading" if loading else "ready")


def test_a_peer_that_refuses_what_it_was_asked_is_lost_once_a_heartbeat(stage):
    """It cannot read a claim, say: with no number of its own that is refused as a hello is."""
    stage.pull(timeout=60.0)
    stage.peer_says(welcome_of())
    stage.run(1.0)
    stage.peer_says(Refuse(0, ErrorCode.BAD_MESSAGE, "what is that?"))
    [failed] = stage.notified
    assert (failed.code, "what is that?" in failed.text) == (ErrorCode.PEER_LOST, True)


def test_a_peer_that_is_asked_for_its_pools_again_may_refuse_that(stage):
    stage.pull(timeout=60.0)
    stage.peer_says(welcome_of())
    call(stage.actors.handshake.need, "tcp://peer:1", worker="w", stale=True)
    stage.run()
    assert len(stage.asks(Hello)) == 2
    stage.peer_says(Refuse(0, ErrorCode.BAD_VERSION, "speaks 9"))
    assert "speaks 9" in stage.notified[0].text


def test_a_welcome_counts_though_its_hello_was_sent_again_meanwhile(stage):
    stage.pull(timeout=60.0)
    stage.run(1.5)
    assert len(stage.asks(Hello)) == 2
    for _ in range(2):
        stage.peer_says(welcome_of())
    assert len(stage.asks(Claim)) == 1


def test_a_pull_hears_that_its_peer_has_a_name_that_leads_nowhere_and_so_does_the_status(stage):
    why = "the name 'peer' cannot be looked up: no server answers"
    stage.dependencies.peer_port.trouble = lambda _link: why
    call(stage.actors.handshake.connector.expect, frozenset({"tcp://peer:1"}))
    stage.pull(timeout=60.0)
    stage.run(5.0)
    assert why in stage.notified[0].text
    assert stage.actors.handshake.report()[0].last_loss == why


def test_a_peer_is_looked_for_when_it_is_greeted_and_not_when_it_is_asked_for_its_pools_again(stage):
    port, greeted = stage.dependencies.peer_port, []
    port.greet = lambda link, frame: (greeted.append(link), port.ask(link, frame))
    stage.pull(timeout=60.0)
    stage.peer_says(welcome_of())
    call(stage.actors.handshake.need, "tcp://peer:1", worker="w", stale=True)
    stage.run()
    assert (len(stage.asks(Hello)), greeted) == (2, [1])
    stage.run(6.0)
    assert len(greeted) > 1
