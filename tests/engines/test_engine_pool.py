"""A pool as an engine gets it: attached, and as a tensor."""

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvd.engines.pool import attach, pool_tensor
from kvd.errors import ErrorCode, InternalError, Unavailable, refusal
from kvd.layout import Axis, CacheSpec, Full, Group, Shard, View

VIEW = View(component="kv", offset=0, axes=(Axis("block", 4, 128), Axis("byte", 128, 1)), layers=(0,))
SPEC = CacheSpec(
    dtype="float16",
    pool_bytes=512,
    groups=(Group(window=Full(), block_tokens=1, num_blocks=4, views=(VIEW,)),),
    shard=Shard(stages=((0, 1),)),
)


def test_an_engine_that_waits_for_its_pool_says_what_for(caplog: pytest.LogCaptureFixture) -> None:
    waits = []

    def attach_later(_socket: str, *, name: str, spec: object, timeout: float) -> str:
        waits.append(timeout)
        if len(waits) == 1:
            raise refusal(ErrorCode.POOL_BUSY, f"the pool {name!r} is lent: another worker has it")
        return "attached"

    assert attach(attach_later, "kvd.sock", "vllm-0-0", SPEC, 60.0) == "attached"
    assert waits == [5.0, 55.0]
    (record,) = caplog.records
    expected = "no KV cache from kvd yet (the pool 'vllm-0-0' is lent: another worker has it); trying for 55 s more"
    assert record.getMessage() == expected


def test_an_engine_that_may_wait_for_a_moment_only_waits_no_longer() -> None:
    def refuse(_socket: str, *, name: str, **_: object) -> None:
        raise refusal(ErrorCode.POOL_BUSY, name)

    with pytest.raises(Unavailable):
        attach(refuse, "kvd.sock", "vllm-0-0", SPEC, 2.0)


def client(raw: bytearray, *, kept: bool, device: str = "") -> Any:
    """An attached worker; its pool on a device is host memory here."""
    address = ctypes.addressof((ctypes.c_char * len(raw)).from_buffer(raw))
    device_pool = SimpleNamespace(pointer=address, ordinal=1, raw=raw)
    return SimpleNamespace(pool=memoryview(raw), kept=kept, device=device, device_pool=device_pool)


def test_the_tensor_shares_the_pools_bytes_and_clears_old_ones() -> None:
    raw = bytearray(b"\x01" * 512)
    assert pool_tensor(client(raw, kept=False))[0] == 1
    tensor = pool_tensor(client(raw, kept=True))
    assert not any(raw)
    tensor[3] = 7
    assert raw[3] == 7


def test_a_pool_on_a_gpu_becomes_a_tensor_at_the_number_that_the_gpu_has_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def shared(pool: Any, device: torch.device) -> torch.Tensor:
        assert device == torch.device("cuda:1")
        return torch.frombuffer(pool.raw, dtype=torch.uint8)

    monkeypatch.setattr(torch, "as_tensor", shared)
    raw = bytearray(b"\x01" * 512)
    tensor = pool_tensor(client(raw, kept=True, device="GPU-1"))
    assert tensor.dtype is torch.int8
    assert not any(raw)


def test_a_copy_of_a_pool_on_a_gpu_is_not_taken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "as_tensor", lambda pool, device: torch.zeros(512, dtype=torch.uint8))
    with pytest.raises(InternalError, match="torch copied the pool at 0x"):
        pool_tensor(client(bytearray(512), kept=False, device="GPU-1"))
