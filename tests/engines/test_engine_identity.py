"""A model has one identity, whichever engine serves it."""

from typing import Any

import pytest

from kvd.engines.identity import identity, overrides, rope, told
from kvd.layout import VERSION_OF, CacheSpec
from kvd.limits import MAX_IDENTITY_BYTES
from kvd.plan import check_compatible
from tests.engines.test_engine_pool import SPEC

ROPE = {"rope_theta": 10000.0, "rope_type": "default"}


def spec(engine: str, fields: dict[str, Any], **changes: str) -> CacheSpec:
    """What an engine declares of a model with these fields in its configuration."""
    given: dict[str, Any] = {"model": "m", "revision": None, "dtype": "torch.bfloat16", "quantization": "none"}
    made = identity(**given | changes, rope=rope(fields), overrides="none", engine=engine, version="0.9.1")
    return CacheSpec(
        dtype=SPEC.dtype, pool_bytes=SPEC.pool_bytes, groups=SPEC.groups, shard=SPEC.shard, identity=told(made)
    )


def test_two_engines_with_one_model_are_compatible_however_they_write_its_configuration() -> None:
    plain = {"hidden_size": 64, "rope_parameters": ROPE, "rope_scaling": None}
    with_the_old_name = {"rope_parameters": {**ROPE, "type": "default", "factor": None}, "hidden_size": 64}
    check_compatible(spec("E", plain), spec("F", with_the_old_name, dtype="bfloat16"))


@pytest.mark.parametrize("change", [{"model": "n"}, {"revision": "v2"}, {"dtype": "float16"}, {"quantization": "fp8"}])
def test_what_must_be_equal_is_so_whatever_the_engine(change: dict[str, str]) -> None:
    fields = {"rope_parameters": ROPE}
    one, other = dict(spec("E", fields).identity), dict(spec("F", fields, **change).identity)
    assert len({name for name in one if name in other and one[name] != other[name]}) == 1
    assert set(one) ^ set(other) == {f"{VERSION_OF}E", f"{VERSION_OF}F"}


def test_an_old_name_of_another_kind_of_rope_is_not_left_out() -> None:
    assert "yarn" in rope({"rope_scaling": {"type": "yarn", "factor": 4.0}})


def test_an_override_of_rope_is_compared_by_its_effect_alone() -> None:
    assert overrides({"rope_theta": 5.0}) == overrides({}) == "none"
    assert "num_experts" in overrides({"num_experts": 2, "rope_theta": 5.0})


def test_what_is_too_long_to_be_told_is_told_by_its_beginning_and_a_hash() -> None:
    (one,), (other,) = (told({"RoPE": "x" * 5000 + last}) for last in "ab")
    assert one != other
    assert len(one[1].encode()) <= MAX_IDENTITY_BYTES
