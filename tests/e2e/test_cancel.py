"""Pulls that are cancelled at once, with real daemons."""

import pytest

from tests.support.fleet import without_lease

MANY = list(range(200))


@pytest.mark.parametrize("whole", [True, False], ids=["named", "claimed"])
def test_a_producer_has_its_blocks_back_when_a_pull_is_cancelled_before_its_claim_was_granted(fleet, whole):
    prefill = fleet.worker(fleet.daemon("p"), "prefill", blocks=len(MANY), block_bytes=1 << 16)
    decode = fleet.worker(fleet.daemon("d"), "decode", blocks=len(MANY), block_bytes=1 << 16)
    for name in ("before the daemons have met", "afterwards"):
        ticket = prefill.call("offer", name=name, ids=MANY)
        decode.order("pull", name=name, ticket=ticket if whole else without_lease(ticket), ids=MANY)
        decode.order("cancel", name=name)
        decode.answer()
        decode.answer()
        assert decode.outcome(name)["kind"] in {"Cancelled", "Done"}
        assert prefill.outcome(name)["reason"] == "read"
