"""`kvd pools end`, and what an engine finds whose predecessor had another name: over real daemons and workers."""

import os

import pytest

from kvd.cli.main import main
from kvd.net.inquiry import Inquiry
from kvd.protocol.status import decode
from tests.support.fleet import until
from tests.support.patience import PATIENCE

pytestmark = pytest.mark.real
SIZE = {"blocks": 64, "block_bytes": 1 << 16}


def pools(daemon):
    with Inquiry(str(daemon.socket)) as inquiry:
        return {pool.worker: pool.state for pool in decode(inquiry.status(PATIENCE)).pools}


def kept(daemon, name):
    for _ in until("its pool is kept"):
        if pools(daemon).get(name) == "kept":
            return


def test_a_kept_pool_is_ended_and_one_that_a_worker_has_is_not(fleet, capsys):
    daemon = fleet.daemon("d")
    worker = fleet.worker(daemon, "w", **SIZE)
    command = ["pools", "end", "w", "--socket", str(daemon.socket)]
    assert main(command) == 2
    assert "pool_busy: the pool 'w' is lent: a worker has it" in capsys.readouterr().err
    worker.kill()
    kept(daemon, "w")
    for _ in until("its process is known to have ended"):
        if main(command) == 0:
            break
    assert capsys.readouterr().out == "the pool 'w' has ended\n"
    assert pools(daemon) == {}
    assert main(command) == 2
    assert "no pool is called 'w'" in capsys.readouterr().err


def test_an_engine_of_another_name_gets_the_room_of_one_that_is_gone(fleet, tmp_path):
    policy = tmp_path / "policy.toml"
    policy.write_text(f'[[workers]]\nuid = {os.getuid()}\npools = ["*"]\nmax_bytes = {6 << 20}\n')
    policy.chmod(0o600)
    daemon = fleet.daemon("d", worker_policy=str(policy))
    fleet.worker(daemon, "vllm-0-0", **SIZE).kill()
    fleet.worker(daemon, "prefill-0", **SIZE)
    assert pools(daemon) == {"prefill-0": "lent"}
