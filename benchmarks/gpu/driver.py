"""Which GPU this is, and the tests of the driver's room on it."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, Final

from kvd.cuda.copies import has_batches
from kvd.cuda.device import Device, device
from kvd.cuda.driver import api, call
from kvd.cuda.memory import Mapping, granule
from kvd.errors import KvdError

ATTRIBUTES: Final = (
    "VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED",
    "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED",
    "HANDLE_TYPE_FABRIC_SUPPORTED",
    "GPU_DIRECT_RDMA_SUPPORTED",
    "GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED",
    "GPU_DIRECT_RDMA_WRITES_ORDERING",
    "GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS",
    "DMA_BUF_SUPPORTED",
    "COMPUTE_MODE",
    "MPS_ENABLED",
)
TESTS: Final = (
    "tests/cuda",
    "tests/memory/test_cuda.py",
    "tests/client/test_cuda.py",
    "tests/daemon/test_gpu_store.py",
    "tests/transport/test_gpu_contract.py",
)


def facts(*, quick: bool) -> dict[str, Any]:  # noqa: ARG001
    """The first GPU."""
    gpu = device(0)
    free, total = gpu.free_and_total()
    return {
        "name": gpu.name,
        "uuid": gpu.uuid,
        "driver (CUDA)": call("cuDriverGetVersion"),
        "free bytes": free,
        "total bytes": total,
        "obstacle": gpu.obstacle() or "none",
        "batched copies": has_batches(),
        "DMA-BUF of own, of imported memory": ", ".join(_dma_bufs(gpu)),
        **{name: gpu.attribute(name) for name in ATTRIBUTES},
    }


def _dma_bufs(gpu: Device) -> Iterator[str]:
    """Whether the driver exports memory for a network card, as the maker of it and as a process that imported it."""
    own = Mapping.allocate(gpu, granule(gpu))
    descriptor = own.export()
    imported = Mapping.map_descriptor(gpu, descriptor, own.length, writable=False)
    os.close(descriptor)
    kind = api().CUmemRangeHandleType.CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
    for memory in (own, imported):
        with gpu.current():
            try:
                os.close(call("cuMemGetHandleForAddressRange", memory.base, memory.length, kind, 0))
            except KvdError as error:
                yield error.text
            else:
                yield "yes"
        memory.close()


def tests(*, quick: bool) -> dict[str, Any]:
    """Runs them on this driver, whichever it is."""
    chosen = TESTS[:1] if quick else TESTS
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen]
    environment = {**os.environ, "TESTS_ON_GPU": "1"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)  # noqa: S603 - ours
    counts = {kind: int(number) for number, kind in re.findall(r"(\d+) (passed|failed|skipped|error)", ran.stdout)}
    if ran.returncode:
        raise AssertionError(f"{counts}: {ran.stdout[-4000:]}{ran.stderr[-300:]}")
    return counts
