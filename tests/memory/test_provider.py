from ctypes.util import find_library

import pytest

from kvd.errors import BadRequest, ErrorCode, Unavailable
from kvd.memory.memfd import MemfdProvider
from kvd.memory.provider import provider_for


def test_host_memory_is_made_of_memfds() -> None:
    assert isinstance(provider_for("cpu"), MemfdProvider)


@pytest.mark.skipif(find_library("cuda") is not None, reason="there is a driver here")
def test_a_gpu_where_there_is_no_driver_is_refused_with_what_to_do() -> None:
    text = r"no pools on 'cuda:0': no NVIDIA driver: .*install the driver.*; or set the device to `cpu`"
    with pytest.raises(Unavailable, match=text) as caught:
        provider_for("cuda:0")
    assert caught.value.code is ErrorCode.NO_DEVICE


def test_an_unknown_kind_of_device_is_a_mistake_of_the_configuration() -> None:
    with pytest.raises(BadRequest, match="device 'tpu' is neither `cpu` nor `cuda:N`"):
        provider_for("tpu")
