"""How fast connections are accepted."""

import asyncio

import pytest

from kvd import limits
from kvd.net.local.gate import Pace


async def test_as_many_as_a_fleet_has_are_accepted_at_once_and_more_as_time_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = asyncio.get_running_loop()
    now = loop.time()
    called: list[float] = []
    monkeypatch.setattr(loop, "time", lambda: now, raising=False)
    monkeypatch.setattr(loop, "call_at", lambda when, _again: called.append(when), raising=False)
    pace, again = Pace(), lambda: None
    burst = sum(pace.admits(again) for _ in range(2 * limits.MAX_ACCEPTS_AT_ONCE))
    assert burst == pytest.approx(limits.MAX_ACCEPTS_AT_ONCE, abs=1)
    assert 0.002 <= called[0] - now <= 0.1
    now += 1.0
    second = sum(pace.admits(again) for _ in range(2 * limits.MAX_ACCEPTS_PER_SECOND))
    assert second == pytest.approx(limits.MAX_ACCEPTS_PER_SECOND, abs=2)
