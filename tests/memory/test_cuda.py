"""Pools in a GPU's memory."""

import os

import pytest

from kvd.cuda.device import Device
from kvd.cuda.memory import Mapping
from kvd.errors import BadRequest, ErrorCode, Unavailable
from kvd.memory.provider import provider_for
from tests.support.gpu import over_standin

MIB = 1 << 20
SIZE = 5 * MIB
LENGTH = 6 * MIB


def own(pool):
    """The pool's mapping, to look at its bytes."""
    return pool._mapping


def refusal(provider, descriptor, size):
    with pytest.raises(BadRequest) as caught:
        provider.adopt(descriptor, size)
    assert caught.value.code is ErrorCode.BAD_POOL
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    return caught.value.text


@over_standin()
def test_a_new_pool_is_zeroed_and_says_where_it_is():
    pool = provider_for("cuda:0").allocate("prefill-0", SIZE)
    assert (pool.size, pool.length, pool.backing) == (SIZE, LENGTH, "cuda")
    assert pool.device.startswith("GPU-")
    assert pool.base % (2 * MIB) == 0
    assert own(pool).read(0, SIZE) == bytes(SIZE)
    pool.close()
    pool.close()


@over_standin()
def test_quotas_count_whole_granules_and_the_pools_mark():
    provider = provider_for("cuda:0")
    assert [provider.footprint(size) // MIB for size in (1, 2 * MIB - 32, 2 * MIB - 31, 2 * MIB)] == [2, 2, 4, 4]


@over_standin()
def test_a_pool_is_adopted_with_its_bytes():
    provider = provider_for("cuda:0")
    first = provider.allocate("prefill-0", SIZE)
    own(first).write(SIZE - 4, b"kept")
    second = provider.adopt(os.dup(first.descriptor), SIZE)
    first.close()
    assert own(second).read(SIZE - 4, 4) == b"kept"
    assert (second.length, second.device) == (LENGTH, first.device)
    second.close()


@over_standin()
def test_a_descriptor_that_is_no_export_of_the_driver_is_refused_unasked_and_closed():
    provider = provider_for("cuda:0")
    assert "of file type 0o20000, device 0x103" in refusal(provider, os.open("/dev/null", os.O_RDWR), SIZE)
    assert "of file type 0o10000" in refusal(provider, os.pipe()[0], SIZE)


@over_standin()
def test_memory_that_is_shorter_than_the_pool_is_refused_and_closed():
    provider = provider_for("cuda:0")
    pool = provider.allocate("prefill-0", SIZE)
    assert "cuMemMap: CUDA_ERROR_" in refusal(provider, os.dup(pool.descriptor), LENGTH)
    pool.close()


@over_standin()
def test_memory_that_is_no_pool_of_that_size_is_refused_and_closed():
    provider = provider_for("cuda:0")
    pool = provider.allocate("prefill-0", SIZE)
    for size in (-1, 0, 1, SIZE - 1):
        assert f"no pool of {size} bytes" in refusal(provider, os.dup(pool.descriptor), size)
    pool.close()
    somebodys = Mapping.allocate(Device(0), LENGTH)
    assert f"no pool of {SIZE} bytes" in refusal(provider, somebodys.export(), SIZE)
    somebodys.close()


@over_standin(device_count=2)
def test_a_pool_of_another_gpu_is_refused_and_closed():
    pool = provider_for("cuda:0").allocate("prefill-0", SIZE)
    refused = refusal(provider_for("cuda:1"), os.dup(pool.descriptor), SIZE)
    assert "the memory is not on GPU 1" in refused
    assert "attach to the daemon of its GPU" in refused
    pool.close()


@over_standin()
def test_a_pool_that_ends_is_zeroed_for_whoever_has_it_mapped_and_is_not_adopted_again():
    provider = provider_for("cuda:0")
    pool = provider.allocate("prefill-0", SIZE)
    own(pool).write(7, b"secret")
    kept = os.dup(pool.descriptor)
    other = Mapping.map_descriptor(Device(0), kept, LENGTH, writable=False)
    pool.free()
    assert other.read(0, LENGTH) == bytes(LENGTH)
    assert "its pool has ended meanwhile; attach without it" in refusal(provider, kept, SIZE)
    other.close()


@over_standin()
def test_a_pool_that_moves_keeps_its_bytes_and_its_descriptor():
    provider = provider_for("cuda:0")
    pool = provider.allocate("prefill-0", SIZE)
    own(pool).write(3, b"kept")
    base, descriptor = pool.base, pool.descriptor
    pool.move()
    assert pool.base != base
    assert pool.descriptor == descriptor
    assert own(pool).read(3, 4) == b"kept"
    pool.close()


@over_standin(total_memory=LENGTH)
def test_a_pool_that_cannot_move_stays_where_it_is():
    pool = provider_for("cuda:0").allocate("prefill-0", SIZE)
    own(pool).write(3, b"kept")
    base = pool.base
    with pytest.raises(Unavailable, match="the pool cannot be mapped anew: cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY"):
        pool.move()
    assert pool.base == base
    assert own(pool).read(3, 4) == b"kept"
    pool.close()


@over_standin(mps=1)
def test_a_gpu_that_cannot_have_pools_is_refused_when_the_daemon_starts():
    with pytest.raises(Unavailable, match=r"no pools on 'cuda:0': GPU 0 .* is used through MPS") as caught:
        provider_for("cuda:0")
    assert caught.value.code is ErrorCode.NO_DEVICE


@over_standin(used_memory=8 << 30)
def test_a_gpu_that_others_have_filled_is_found_out_when_the_daemon_starts():
    with pytest.raises(Unavailable, match=r"no pools on 'cuda:0': cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY .*nvidia-smi"):
        provider_for("cuda:0")


@over_standin()
def test_more_memory_than_the_gpu_has_is_refused_with_both_numbers():
    provider = provider_for("cuda:0")
    free, total = Device(0).free_and_total()
    needed = provider.footprint(1 << 45)
    with pytest.raises(Unavailable, match=rf"needs {needed} bytes of GPU 0 .* {free} of {total} are free") as caught:
        provider.allocate("prefill-0", 1 << 45)
    assert caught.value.code is ErrorCode.OVERLOADED
    assert "cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY" in caught.value.text


@over_standin()
def test_an_empty_pool_is_refused():
    with pytest.raises(BadRequest, match="pool 'prefill-0' of 0 bytes"):
        provider_for("cuda:0").allocate("prefill-0", 0)


@over_standin()
def test_a_gpu_that_is_not_there_is_refused_with_the_device_that_was_set():
    with pytest.raises(Unavailable, match=r"no pools on 'cuda:7': no GPU 7: .*; or set the device to `cpu`"):
        provider_for("cuda:7")


@over_standin()
def test_no_descriptor_is_left_of_what_was_made_adopted_and_refused():
    provider = provider_for("cuda:0")
    before = len(os.listdir("/proc/self/fd"))
    pool = provider.allocate("prefill-0", SIZE)
    provider.adopt(os.dup(pool.descriptor), SIZE).free()
    refusal(provider, os.dup(pool.descriptor), SIZE)
    pool.move()
    pool.close()
    assert len(os.listdir("/proc/self/fd")) <= before + 1, "the zeros at the pool's old address stay"
