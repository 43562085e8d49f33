"""Processes that die and stand still at random under load; `python -m tests.vllm.chaos` does it for longer."""

import random
from pathlib import Path

import pytest

from kvd.errors import BadRequest
from tests.support.patience import PATIENCE
from tests.vllm.chaos.run import Bounds, Plan, run
from tests.vllm.shared import LOST_SOON

SECONDS = 60.0
"""In which rounds begin: five or so."""


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "groups", "router"), [("fail", "session", False), ("recompute", "cgroup", True)])
async def test_whatever_dies_or_stands_still_no_token_is_wrong_no_request_late_and_all_works_again(
    models: Path, tmp_path_factory: pytest.TempPathFactory, policy: str, groups: str, router: bool
) -> None:
    plan = Plan(
        seed=random.randrange(1 << 32),  # noqa: S311  # no secret
        seconds=SECONDS,
        policy=policy,
        groups=groups,
        router=router,
        bounds=Bounds(deadline=PATIENCE, recovery=PATIENCE),
        settings=LOST_SOON,
    )
    print(plan)  # what a run needs to be made again
    try:
        verdict = await run(plan, tmp_path_factory.mktemp("chaos"), models, print)  # sockets have short paths
    except BadRequest as error:
        pytest.skip(error.text)
    assert verdict.broken == []
    assert verdict.rounds > 0
