"""The adapter's settings, of one rank and of several."""

import json

import pytest

from kvd.engines.sglang.settings import VARIABLE, read_settings
from kvd.errors import BadRequest, ErrorCode


def test_each_rank_has_a_socket_and_a_pool_of_its_own() -> None:
    given = {VARIABLE: json.dumps({"socket": "/run/kvd/{rank}.sock"})}
    found = [read_settings(given, rank, 2) for rank in range(2)]
    assert [settings.socket for settings in found] == ["/run/kvd/0.sock", "/run/kvd/1.sock"]
    assert [settings.worker for settings in found] == ["sglang-0", "sglang-1"]


def test_ranks_that_would_share_a_pool_are_refused() -> None:
    given = {VARIABLE: json.dumps({"socket": "/run/kvd.sock", "worker": "ours"})}
    assert read_settings(given, 0, 1).worker == "ours"
    with pytest.raises(BadRequest, match="2 ranks need a pool each") as caught:
        read_settings(given, 0, 2)
    assert caught.value.code == ErrorCode.BAD_CONFIG
