from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from kvd.plan import Descriptors, Planner, SpanPair, check_compatible, route
from tests.plan.layout_cases import Case, cases
from tests.plan.layout_reference import fewest_descriptors, mapping

thorough = settings(
    max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


def plans(case: Case) -> list[tuple[int, Descriptors]]:
    spans = [
        SpanPair(
            source.first,
            np.array(source.ids, dtype=np.uint32),
            wanted.first,
            np.array(wanted.ids, dtype=np.uint32),
        )
        for source, wanted in zip(case.offered, case.wanted, strict=True)
    ]
    for source in case.sources:
        check_compatible(source, case.destination)
    shares = route(case.sources, case.destination).shares
    return [
        (share.source, Planner(case.sources[share.source], case.destination, share).plan(spans, case.tokens))
        for share in shares
    ]


@pytest.mark.sample(7)
@pytest.mark.parametrize("few", [0, 1 << 20], ids=["in arrays", "one by one"])
@pytest.mark.parametrize("part", range(6))  # cut, so that no part comes near the time that a test may take
@thorough
@given(case=cases())
def test_every_needed_byte_is_moved_once_from_where_it_lies_and_no_other_byte_is_touched(
    part: int, few: int, case: Case
) -> None:
    expected = mapping(case.sources, case.offered, case.destination, case.wanted, case.tokens)
    random = np.random.default_rng(len(expected))
    pools = [random.integers(0, 256, source.pool_bytes, dtype=np.uint8) for source in case.sources]
    before = random.integers(0, 256, case.destination.pool_bytes, dtype=np.uint8)
    after, reference, touched = before.copy(), before.copy(), np.zeros(len(before), dtype=np.uint8)
    copies: dict[int, tuple[int, int]] = {}
    with mock.patch("kvd.plan.planner.FEW", few):
        planned = plans(case)
    for rank, plan in planned:
        fewest: dict[int, int] = {}
        for src, dst, length in zip(plan.src.tolist(), plan.dst.tolist(), plan.length.tolist(), strict=True):
            assert length > 0
            assert src + length <= len(pools[rank])
            assert dst + length <= len(after)
            after[dst : dst + length] = pools[rank][src : src + length]
            touched[dst : dst + length] += 1
            for i in range(length):
                copies[dst + i] = (rank, src + i)
                fewest[dst + i] = src + i
        assert plan.count == fewest_descriptors(fewest)
        assert plan.bytes == len(fewest)
    assert touched.max(initial=0) <= 1
    assert copies.keys() == expected.keys()
    for to, (rank, address) in copies.items():
        assert expected[to].get(rank) == address
        reference[to] = pools[rank][expected[to][rank]]
    assert np.array_equal(after, reference)
