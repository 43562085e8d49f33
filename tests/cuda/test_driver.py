"""What goes wrong with a driver is said in its own words, with the call and with what to do."""

import sys
from unittest.mock import patch

import pytest

import kvd.cuda.device
from kvd.cuda import driver
from kvd.cuda.device import Device, device, device_of
from kvd.cuda.driver import api, check
from kvd.cuda.memory import Mapping
from kvd.errors import DeviceError, ErrorCode, Unavailable
from tests.support.gpu import over_standin


@pytest.fixture
def fresh():
    """The driver is looked for anew, here and by whoever comes next."""
    driver.api.cache_clear()
    yield
    driver.api.cache_clear()


@pytest.mark.usefixtures("fresh")
def test_without_cuda_bindings_the_extra_to_install_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(Unavailable, match=r"pip install '\.\[cuda\]'") as caught:
        driver.call("cuDeviceGetCount")
    assert caught.value.code is ErrorCode.NO_DEVICE


@over_standin()
def test_a_call_that_fails_names_itself_the_error_and_the_reason():
    with pytest.raises(DeviceError, match=r"cuDeviceGet: CUDA_ERROR_INVALID_DEVICE \(.+\)") as caught:
        driver.call("cuDeviceGet", 99)
    assert caught.value.result == "CUDA_ERROR_INVALID_DEVICE"


@over_standin()
def test_an_error_that_the_bindings_do_not_know_is_shown_by_its_number():
    with pytest.raises(DeviceError, match="cuNew: CUDA error 12345, which this cuda-bindings does not know"):
        driver.check(12345, "cuNew")


@over_standin(without=("cuMemCreate",))
def test_a_call_that_the_driver_does_not_have_is_a_matter_of_versions():
    with pytest.raises(Unavailable, match=r"lacks cuMemCreate .* update the older of the two"):
        Mapping.allocate(device(0), 2 << 20)


@over_standin(without=("cuInit",))
def test_a_library_that_is_no_driver_is_said_to_be_none():
    with pytest.raises(Unavailable, match=r"no NVIDIA driver: .*install the driver"):
        device(0)


@over_standin()
def test_a_call_that_the_bindings_do_not_have_is_a_matter_of_versions():
    with pytest.raises(Unavailable, match=r"lacks cuFromTheFuture .* update the older of the two"):
        driver.call("cuFromTheFuture")


@over_standin()
def test_an_ordinal_out_of_range_is_refused_with_the_number_there_is():
    with pytest.raises(Unavailable, match=r"no GPU 99: this process sees .* \(CUDA_VISIBLE_DEVICES") as caught:
        Device(99)
    assert caught.value.code is ErrorCode.NO_DEVICE


@over_standin()
def test_a_gpu_is_found_by_its_uuid():
    gpu = device(0)
    assert gpu.uuid.startswith("GPU-")
    assert len(gpu.uuid) == len("GPU-00010203-0405-0607-0809-0a0b0c0d0e0f")
    assert device_of(gpu.uuid) is gpu


@over_standin(env={"CUDA_VISIBLE_DEVICES": "0"})
def test_a_gpu_that_the_process_does_not_see_is_refused_with_those_it_sees():
    text = r"the pool is on GPU-else, .*it sees GPU 0 \(.*\) \(CUDA_VISIBLE_DEVICES='0'\); attach to that GPU's daemon"
    with pytest.raises(Unavailable, match=text) as caught:
        device_of("GPU-else")
    assert caught.value.code is ErrorCode.NO_DEVICE


@over_standin()
def test_the_context_is_current_only_inside():
    gpu = device(0)
    for _ in range(2):
        with gpu.current():
            assert int(driver.call("cuCtxGetCurrent")) != 0
        assert int(driver.call("cuCtxGetCurrent")) == 0


@over_standin()
def test_an_error_inside_is_not_replaced_by_one_of_the_call_that_ends_the_context():
    def call(name, *arguments):
        if name == "cuCtxPopCurrent":
            raise DeviceError(ErrorCode.NO_DEVICE, "cuCtxPopCurrent", "CUDA_ERROR_UNKNOWN")
        return driver.call(name, *arguments)

    with patch.object(kvd.cuda.device, "call", call), pytest.raises(KeyError), device(0).current():
        raise KeyError


@over_standin()
def test_an_attribute_that_this_driver_does_not_know_is_zero():
    assert device(0).attribute("FROM_THE_FUTURE") == 0


@over_standin(device_count=0)
def test_without_a_gpu_the_reason_and_where_to_look_are_said():
    with pytest.raises(DeviceError, match=r"cuInit: CUDA_ERROR_NO_DEVICE; `nvidia-smi -L` .* CUDA_VISIBLE_DEVICES"):
        device(0)


@over_standin(device_error=700)
def test_a_gpu_whose_context_is_lost_is_said_to_need_a_restart():
    with pytest.raises(DeviceError, match=r"CUDA_ERROR_ILLEGAL_ADDRESS.*dmesg.* restart this process"):
        device(0)


@over_standin()
def test_the_context_is_lost_with_each_error_after_which_the_driver_wants_the_process_to_end():
    documented = {error: " ".join((error.__doc__ or "").split()) for error in api().CUresult}
    ends = [error for error, text in documented.items() if "process must be terminated" in text]
    assert "CUDA_ERROR_LAUNCH_TIMEOUT" in [error.name for error in ends]
    for error in ends:
        with pytest.raises(DeviceError) as raised:
            check(error, "cuStreamSynchronize")
        assert raised.value.lost, error.name


def obstacle() -> str:
    return device(0).obstacle()


@over_standin()
def test_a_gpu_that_can_have_pools_has_no_obstacle():
    assert not obstacle()


@over_standin(vmm=0)
def test_a_gpu_without_virtual_memory_management_cannot_have_pools():
    assert "no virtual memory management (VMM)" in obstacle()


@over_standin(posix_handles=0)
def test_a_gpu_that_cannot_export_descriptors_cannot_have_pools():
    assert "cannot share memory by file descriptors" in obstacle()


@over_standin(mps=1)
def test_a_gpu_behind_mps_cannot_have_pools_and_it_is_said_how_to_stop_it():
    assert "through MPS" in obstacle()
    assert "nvidia-cuda-mps-control" in obstacle()


@over_standin(compute_mode=3)
def test_a_gpu_for_one_process_alone_cannot_have_pools():
    assert "nvidia-smi -c DEFAULT" in obstacle()


@over_standin(device_count=3)
def test_each_gpu_has_an_identity_of_its_own():
    assert len({device(ordinal).uuid for ordinal in range(3)}) == 3


@over_standin(mig=1)
def test_a_mig_instance_is_called_one():
    assert device(0).uuid.startswith("MIG-")
