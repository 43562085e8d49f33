import numpy as np
import pytest

from kvd.engines.demo.messages import EngineConfig
from kvd.engines.demo.report import Amount, Traffic
from kvd.engines.demo.spec import engine_specs
from kvd.errors import BadRequest, ErrorCode
from kvd.protocol.ticket import Ticket, TicketRank
from kvd.protocol.types import Span


def specs(model, **changes):
    plain = {"layout": "flash-hnd", "tp_size": 1, "block_tokens": 16, "num_blocks": 32}
    return engine_specs(model.config, EngineConfig(name="e", socket="s", seed=0, **(plain | changes)))


def ticket_for(tokens, ids):
    rank = TicketRank(daemon="d", address="tcp://a", incarnation=1, pool="p", offer="o", blocks=0, secret=bytes(16))
    span = Span(group=0, first=0, ids=np.array(ids, dtype="<u4").tobytes())
    return Ticket(tokens=tokens, ranks=(rank,), blocks=((span,),)).encode()


BLOCK_BYTES = 3 * 2 * 8 * 16 * 64 * 4  # layers, K and V, heads, tokens, dim, bytes an element


def test_adjacent_blocks_of_equal_layouts_take_a_descriptor_a_layer_and_side(model):
    traffic = Traffic(specs(model), specs(model))
    assert traffic.of(ticket_for(40, [4, 5, 6]), [1, 2, 3]) == Amount(3 * BLOCK_BYTES, 3 * 2)


def test_the_ranks_of_both_sides_are_added_up(model):
    traffic = Traffic(specs(model, tp_size=2), specs(model, tp_size=4))
    assert traffic.of(ticket_for(40, [4, 9, 6]), [1, 2, 3]) == Amount(3 * BLOCK_BYTES, 4 * 3 * 2 * 3)


def test_caches_that_do_not_fit_are_refused_before_anything_is_started(model):
    with pytest.raises(BadRequest, match="source has 48, destination has 32") as refused:
        Traffic(specs(model, block_tokens=48), specs(model, block_tokens=32))
    assert refused.value.code is ErrorCode.INCOMPATIBLE
