"""GPUs: whether pools can be on them, and whether their memory outlives its users."""

from kvd.cuda.copies import pin, unpin
from kvd.cuda.device import Device, device
from kvd.cuda.driver import call
from kvd.doctor import Finding, Level
from kvd.errors import DeviceError, Unavailable
from kvd.memory.cuda import CudaProvider
from kvd.memory.memfd import Backing, MemfdProvider
from kvd.units import size

_PERSISTENCE_FIX = "systemctl enable --now nvidia-persistenced, or nvidia-smi -pm 1"


def check_gpus(configured: str) -> list[Finding]:
    """Findings for each GPU; without one, that is broken if the daemon's `device`, `configured`, is one."""
    bad = Level.BROKEN if configured.startswith("cuda") else Level.NOTE
    try:
        count = call("cuDeviceGetCount")
    except Unavailable as error:
        return [Finding("GPU", bad, error.text, "" if bad is Level.BROKEN else "none is needed for `--device cpu`")]
    return [finding for ordinal in range(count) for finding in _check(ordinal, bad)]


def _check(ordinal: int, bad: Level) -> list[Finding]:
    try:
        CudaProvider(ordinal)  # allocates and exports a little
        gpu = device(ordinal)
    except Unavailable as error:
        return [Finding(f"GPU {ordinal}", bad, f"pools cannot be on it: {error.text}")]
    reach = "reach" if gpu.attribute("GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED") else "do not reach"
    text = f"{gpu.name}, {gpu.uuid}, {size(gpu.free_and_total()[1])}: memory can be shared; "
    findings = [Finding(f"GPU {ordinal}", Level.OK, f"{text}network cards {reach} it")]
    if gpu.uuid.startswith("MIG-"):
        findings.append(Finding(f"GPU {ordinal}", Level.NOTE, "a MIG instance, on which kvd was never tried"))
    return [*findings, _check_network(gpu), _check_pinning(gpu), _check_persistence(gpu)]


def _check_network(gpu: Device) -> Finding:
    """How other hosts read from it: one way is built, whatever the driver could do."""
    can = gpu.attribute("DMA_BUF_SUPPORTED") and gpu.attribute("GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED")
    driver = (
        "could register it with network cards by DMA-BUF, which this version does not ask for"
        if can
        else ("registers it with no network card (no DMA-BUF)")
    )
    text = f"other hosts read pools on it, and it from them, by way of pinned host memory: the driver {driver}"
    return Finding(f"GPU {gpu.ordinal} network", Level.NOTE, text)


def _check_pinning(gpu: Device) -> Finding:
    """Whether it copies to and from host memory by itself: pools of other daemons, and what other hosts read."""
    subject = f"GPU {gpu.ordinal} pinned memory"
    memory = MemfdProvider(Backing.PLAIN).allocate("doctor", 1)
    try:
        pin(gpu, memory.base, memory.length, writable=True)
    except DeviceError as error:
        fix = (
            "raise the limit on locked memory (`ulimit -l`, LimitMEMLOCK=, IPC_LOCK); the daemon's log names each pool"
        )
        return Finding(subject, Level.SLOW, f"host memory cannot be pinned: {error.text}; it is copied twice", fix)
    else:
        unpin(gpu, memory.base)
        return Finding(subject, Level.OK, "host memory can be pinned")
    finally:
        memory.free()


def _check_persistence(gpu: Device) -> Finding:
    """Without persistence, a GPU forgets its memory when no process has it open: pools in systemd's store, too."""
    subject = f"GPU {gpu.ordinal} persistence"
    try:
        from cuda.bindings import nvml  # noqa: PLC0415 - an extra
    except ImportError:
        return Finding(subject, Level.NOTE, "unknown: this cuda-bindings has no NVML", _PERSISTENCE_FIX)
    try:
        nvml.init_v2()
        mode = nvml.device_get_persistence_mode(nvml.device_get_handle_by_uuid(gpu.uuid))
    except (RuntimeError, nvml.NvmlError) as error:
        return Finding(subject, Level.NOTE, f"unknown: NVML says {error}", _PERSISTENCE_FIX)
    if mode:
        return Finding(subject, Level.OK, "on: pools outlive a restart of daemon and worker together")
    return Finding(subject, Level.NOTE, "off: without any process on the GPU its pools are gone", _PERSISTENCE_FIX)
