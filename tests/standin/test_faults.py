"""What a test can make of the machine: fewer abilities, other devices, errors."""

import ctypes
import os
import subprocess
import time

import pytest

from tests.standin.build import NoCompiler, build
from tests.standin.calls import (
    GRANULE,
    NON_BLOCKING,
    batch,
    cu,
    do,
    error,
    memory,
    prop,
    read,
    settle,
    start,
    text_of,
)
from tests.standin.children import abort, environment, program, run, succeed


def test_memory_runs_out_and_comes_back(standin):
    def child():
        start()
        assert do(cu.cuMemGetInfo) == [3 * GRANULE, 4 * GRANULE]
        mine = memory(2 * GRANULE)
        assert do(cu.cuMemGetInfo) == [GRANULE, 4 * GRANULE]
        assert error(cu.cuMemCreate, 2 * GRANULE, prop(), 0) == "OUT_OF_MEMORY"
        mine.close()
        memory(3 * GRANULE)

    standin.set(total_memory=4 * GRANULE, used_memory=GRANULE)
    assert succeed(standin, child) == ""


def test_a_lost_device_fails_every_call_also_those_that_wait(standin):
    def child():
        start()
        stream = do(cu.cuStreamCreate, NON_BLOCKING)
        do(cu.cuMemsetD8Async, memory().address, 0, 4096, stream)
        print("waits", flush=True)
        assert error(cu.cuStreamSynchronize, stream) == "ECC_UNCORRECTABLE"
        assert error(cu.cuMemGetInfo) == "ECC_UNCORRECTABLE"
        assert error(cu.cuMemCreate, GRANULE, prop(), 0) == "ECC_UNCORRECTABLE"

    standin.set(hold=1)
    with subprocess.Popen(program(child), env=environment(standin), stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"waits\n"
        standin.set(device_error=214)
        assert process.wait(60) == 0


def test_a_device_without_vmm_or_descriptors_says_so_and_refuses(standin):
    def child(vmm, posix):
        device, attribute = start(), cu.CUdevice_attribute
        names = ("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED", "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED")
        has = [do(cu.cuDeviceGetAttribute, getattr(attribute, f"CU_DEVICE_ATTRIBUTE_{n}"), device) for n in names]
        assert has == [int(vmm), int(posix)]
        assert error(cu.cuMemCreate, GRANULE, prop(), 0) == "NOT_SUPPORTED"
        assert error(cu.cuMemAddressReserve, GRANULE, 0, 0, 0) == ("SUCCESS" if int(vmm) else "NOT_SUPPORTED")

    standin.set(vmm=0)
    succeed(standin, child, "0", "1")
    standin.set(vmm=1, posix_handles=0)
    succeed(standin, child, "1", "0")


def test_devices_are_as_many_as_the_machine_has(standin):
    def child(count):
        assert error(cu.cuInit, 0) == ("SUCCESS" if int(count) else "NO_DEVICE")
        if int(count):
            assert do(cu.cuDeviceGetCount) == int(count)
            assert len({bytes(do(cu.cuDeviceGetUuid, ordinal).bytes) for ordinal in range(int(count))}) == int(count)
            assert error(cu.cuDeviceGet, int(count)) == "INVALID_DEVICE"

    for count in (0, 1, 11):
        standin.set(device_count=count)
        succeed(standin, child, str(count))


def test_cuda_visible_devices_renumbers_the_devices_and_hides_the_rest(standin):
    def child(*uuids):
        if not uuids:
            assert error(cu.cuInit, 0) == "NO_DEVICE"
        else:
            do(cu.cuInit, 0)
            seen = [bytes(do(cu.cuDeviceGetUuid, ordinal).bytes) for ordinal in range(do(cu.cuDeviceGetCount))]
            assert seen == [uuid.encode() for uuid in uuids]

    standin.set(device_count=3)
    first, second, third = (f"standin-gpu-000{board}" for board in range(3))
    uuid = second.encode().hex()
    dashed = f"GPU-{uuid[:8]}-{uuid[8:12]}-{uuid[12:16]}-{uuid[16:20]}-{uuid[20:]}"
    succeed(standin, child, third, first, CUDA_VISIBLE_DEVICES="2,0")
    succeed(standin, child, second, CUDA_VISIBLE_DEVICES=dashed)
    succeed(standin, child, first, CUDA_VISIBLE_DEVICES="0,7,1")
    succeed(standin, child, CUDA_VISIBLE_DEVICES="")


def test_mps_and_mig_show_in_attributes_name_and_uuid(standin):
    def child():
        device = start()
        assert do(cu.cuDeviceGetAttribute, cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MPS_ENABLED, device) == 1
        assert b"MIG" in do(cu.cuDeviceGetName, 64, device)
        assert bytes(do(cu.cuDeviceGetUuid, device).bytes) == b"standin-mig-0000"

    standin.set(mps=1, mig=1)
    succeed(standin, child)


def test_a_driver_that_lacks_a_function_makes_cuda_bindings_say_which(standin):
    def child():
        start()
        with pytest.raises(RuntimeError, match="cuMemcpyBatchAsync"):
            batch(cu.CUstream(0), [], [], [])

    older = build(without=("cuMemcpyBatchAsync_v2",))
    succeed(standin, child, LD_LIBRARY_PATH=os.fspath(older))
    standin.set(driver_version=12080)
    succeed(standin, child)


def test_a_batch_in_the_form_of_13_0_aborts_where_that_of_12_8_was_asked_for(standin):
    def child():
        start()
        address, _ = do(cu.cuGetProcAddress, b"cuMemcpyBatchAsync", 12080, 0)
        stream = do(cu.cuStreamCreate, NON_BLOCKING)
        ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 8)(address)(0, 0, 0, 0, 0, 0, 0, int(stream))

    assert "called in the form of CUDA 13.0" in abort(standin, child)


def test_copies_are_held_until_they_are_released(standin):
    def child():
        start()
        stream, mine = do(cu.cuStreamCreate, NON_BLOCKING), memory()
        do(cu.cuMemsetD8Async, mine.address, 1, 4096, stream)
        print("queued", error(cu.cuStreamQuery, stream), flush=True)
        do(cu.cuStreamSynchronize, stream)
        assert read(mine.address, 4096) == b"\1" * 4096

    standin.set(hold=1)
    with subprocess.Popen(program(child), env=environment(standin), stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"queued NOT_READY\n"
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.1)
        standin.set(hold=0)
        assert process.wait(60) == 0


def test_copies_are_held_until_somebody_asks(standin):
    def child():
        start()
        stream, mine, landed = do(cu.cuStreamCreate, NON_BLOCKING), memory(), do(cu.cuMemHostAlloc, 4096, 0)
        do(cu.cuMemcpyDtoHAsync, landed, mine.address, 4096, stream)
        time.sleep(0.05)
        assert ctypes.string_at(landed, 4096) == b"\0" * 4096
        assert settle(cu.cuStreamQuery, stream) == "SUCCESS"
        assert ctypes.string_at(landed, 4096) == b"\xa5" * 4096

    standin.set(hold=2)
    succeed(standin, child)


def test_copies_take_as_long_as_is_set(standin):
    def child():
        start()
        a, b, stream = memory(), memory(), do(cu.cuStreamCreate, NON_BLOCKING)
        began = time.monotonic()
        do(batch, stream, [b.address] * 4, [a.address] * 4, [4096] * 4)
        do(cu.cuStreamSynchronize, stream)
        assert time.monotonic() - began >= 0.04

    standin.set(copy_us=10_000)
    succeed(standin, child)


def test_a_setting_that_does_not_exist_is_refused(standin):
    with pytest.raises(ValueError, match="nonesuch"):
        standin.set(nonesuch=1)


def test_errors_have_the_names_and_texts_of_the_real_driver(standin):
    def child():
        assert text_of(2) == ("CUDA_ERROR_OUT_OF_MEMORY", "out of memory")
        assert text_of(46) == ("CUDA_ERROR_DEVICE_UNAVAILABLE", "CUDA-capable device(s) is/are busy or unavailable")
        numbers = [int(number) for number in cu.CUresult]
        names = {number: cu.cuGetErrorName(cu.CUresult(number))[1] for number in numbers}
        assert all(name.decode() == cu.CUresult(number).name for number, name in names.items() if name)

    succeed(standin, child)


def test_without_a_compiler_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(NoCompiler, match="neither is on PATH: install one"):
        build(tmp_path)


def test_the_driver_is_built_once_for_each_content(standin, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert os.fspath(build()) == standin.environment["LD_LIBRARY_PATH"]


def test_a_control_file_that_is_not_there_is_fatal(standin):
    def child():
        start()

    ended = run(standin, child, STANDIN_CONTROL="/nonexistent")
    assert ended.returncode == -6
    assert "STANDIN_CONTROL: /nonexistent cannot be mapped" in ended.stderr
