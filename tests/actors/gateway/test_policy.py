"""Which users may attach, under which names, with how many bytes."""

import os

import pytest

from kvd.actors.gateway.admission import Policy, Rule, load
from kvd.actors.runtime.pace import RateLimit, TokenBucket
from kvd.errors import BadRequest, ErrorCode

FILE = """
[[workers]]
uid = 1000
pools = ["prefill-*"]
max_bytes = 4096

[[workers]]
gid = 44
pools = ["decode-?", "draft"]
"""


def test_without_rules_the_daemons_user_and_root_may_attach_and_nobody_else():
    policy = Policy(owner=500)
    assert policy.permit(500, 7, "any") is None
    assert policy.permit(0, 0, "any") is None
    with pytest.raises(BadRequest, match=r"user 1000 .* may not attach as .any.: run it as user 500") as caught:
        policy.permit(1000, 7, "any")
    assert caught.value.code is ErrorCode.NOT_PERMITTED


def test_a_rule_admits_its_user_to_its_pools_and_to_no_other(tmp_path):
    file = tmp_path / "policy.toml"
    file.write_text(FILE)
    file.chmod(0o644)
    policy = Policy(500, load(file))
    assert policy.permit(1000, 7, "prefill-3") == 4096
    assert policy.permit(2000, 44, "decode-0") is None
    for uid, gid, pool in ((1000, 7, "decode-0"), (2000, 44, "decode-10"), (2000, 7, "draft"), (44, 1, "draft")):
        with pytest.raises(BadRequest, match="may not attach"):
            policy.permit(uid, gid, pool)


def test_a_rule_with_uid_and_gid_needs_both():
    policy = Policy(500, [Rule(pools=("*",), uid=1000, gid=44)])
    assert policy.permit(1000, 44, "a") is None
    with pytest.raises(BadRequest):
        policy.permit(1000, 45, "a")


@pytest.mark.parametrize(
    ("text", "mode", "reason"),
    [
        ('[[workers]]\npools = ["*"]', 0o644, "let everybody in"),
        ("[[workers]]\nuid = 1", 0o644, "pools"),
        ('[[workers]]\nuid = "root"\npools = ["*"]', 0o644, "Expected `int"),
        ('[[workers]]\nuid = 1\npools = ["*"]\nquota = 3', 0o644, "quota"),
        ("[[workers", 0o644, "policy.toml: "),
        ("workers = []", 0o666, "chmod go-w"),
    ],
)
def test_an_invalid_policy_is_refused_with_its_reason(tmp_path, text, mode, reason):
    file = tmp_path / "policy.toml"
    file.write_text(text)
    file.chmod(mode)
    with pytest.raises(BadRequest, match=reason) as caught:
        load(file)
    assert caught.value.code is ErrorCode.BAD_CONFIG


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")
def test_a_policy_of_another_user_is_refused_whatever_its_mode(tmp_path):
    file = tmp_path / "policy.toml"
    file.write_text(FILE)
    file.chmod(0o444)
    os.chown(file, 12345, -1)
    with pytest.raises(BadRequest, match="belongs to user 12345, who could admit themselves; run `chown 0 "):
        load(file)


def test_a_rate_limit_lets_a_burst_through_and_then_so_many_a_second():
    rate = TokenBucket(RateLimit(per_second=10.0, burst=5), now=0.0)
    assert [rate.take(0.0) for _ in range(7)] == [True] * 5 + [False] * 2
    assert not rate.is_full(0.1)
    assert [rate.take(0.21) for _ in range(3)] == [True, True, False]
    assert rate.is_full(10.0)
    assert sum(rate.take(100.0) for _ in range(50)) == 5
