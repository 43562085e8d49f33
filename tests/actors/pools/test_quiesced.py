from kvd.actors.pools.pool import State
from kvd.actors.pools.requests import DetachPool
from kvd.actors.runtime.actor import call
from kvd.protocol.peer import Fence
from kvd.protocol.worker import Detach
from tests.actors.stage import Stage, make_claim


def test_a_quiesced_that_comes_after_its_pool_is_gone_is_ignored():
    stage = Stage(attach_wait=1.0)
    stage.attach()
    stage.offer()
    generation = stage.asked_by_peer(make_claim())[0].generation
    stage.session(Detach())
    call(stage.actors.leases.claims.requested, b"peer", "peer", Fence(1, generation))  # the reader finishes,
    call(stage.actors.pools._overdue, "w")  # and its time is over, in one turn
    stage.run(0.1)
    assert stage.actors.pools._records == {}


def test_a_quiesced_of_an_earlier_epoch_says_nothing_of_the_pool_as_it_is():
    stage = Stage()
    stage.attach()
    record = stage.actors.pools._records["w"]
    earlier = record.pool
    stage.hang_up()
    stage.attach(connection=2, instance=b"j" * 16)  # the same memory, another epoch
    record.state, record.users, record.waiting = State.QUIESCING, {"leases", "scheduler"}, DetachPool(2, "w")
    for name in ("leases", "scheduler"):
        call(stage.actors.pools.quiesced, earlier, name)
    stage.run()
    assert (record.state, record.users) == (State.QUIESCING, {"leases", "scheduler"})
