from stage import Stage, make_claim

from kvd.actors.messages import PeerAsks, Quiet
from kvd.actors.pools import _Overdue
from kvd.actors.record import Stage as PoolStage
from kvd.protocol.peer import Fence
from kvd.protocol.worker import Detach


def test_a_quiet_that_comes_after_its_pool_is_gone_is_ignored():
    stage = Stage(attach_wait=1.0)
    stage.attach()
    stage.offer()
    generation = stage.asked_by_peer(make_claim())[0].generation
    stage.session(Detach())
    stage.house.leases.tell(PeerAsks(b"peer", "peer", Fence(1, generation)))  # the reader finishes,
    stage.house.pools.tell(_Overdue("w"))  # and the patience with it ends, in one turn of the loop
    stage.run(0.1)
    assert stage.house.pools._records == {}


def test_a_quiet_of_an_earlier_epoch_says_nothing_of_the_pool_as_it_is():
    stage = Stage()
    stage.attach()
    record = stage.house.pools._records["w"]
    earlier = record.pool
    stage.hang_up()
    stage.attach(connection=2, instance=b"j" * 16)  # the same memory, another epoch
    record.stage, record.noisy, record.detaching = PoolStage.QUIETING, {"leases", "scheduler"}, 2
    for name in ("leases", "scheduler"):
        stage.house.pools.tell(Quiet(earlier, name))
    stage.run()
    assert (record.stage, record.noisy) == (PoolStage.QUIETING, {"leases", "scheduler"})
