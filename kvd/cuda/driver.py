"""Calls of the driver API that raise what kvd raises: the error's CUDA name, the call, and what to do."""

import functools
from types import ModuleType
from typing import Any, Final

from kvd.errors import DeviceError, ErrorCode, KvdError, refusal

_RESTART: Final = "the GPU's context is lost: see `dmesg` for Xid errors, then restart this process"
_LOST: Final = frozenset(
    f"CUDA_ERROR_{name}"
    for name in (
        "ECC_UNCORRECTABLE",
        "NVLINK_UNCORRECTABLE",
        "CONTAINED",
        "EXTERNAL_DEVICE",
        "ILLEGAL_ADDRESS",
        "LAUNCH_TIMEOUT",
        "ASSERT",
        "HARDWARE_STACK_ERROR",
        "ILLEGAL_INSTRUCTION",
        "MISALIGNED_ADDRESS",
        "INVALID_ADDRESS_SPACE",
        "INVALID_PC",
        "LAUNCH_FAILED",
        "TENSOR_MEMORY_LEAK",
        "MPS_CLIENT_TERMINATED",
        "CONTEXT_IS_DESTROYED",
        "DEINITIALIZED",
    )
)
"""The context is lost with these: CUDA repeats them until the process ends."""
_HINTS: Final = {
    "CUDA_ERROR_OUT_OF_MEMORY": "`nvidia-smi` shows who has the GPU's memory",
    "CUDA_ERROR_NO_DEVICE": "`nvidia-smi -L` lists the GPUs; check CUDA_VISIBLE_DEVICES, and that the service or "
    "container may open /dev/nvidia*",
    "CUDA_ERROR_DEVICE_UNAVAILABLE": "another process has the GPU for itself: `nvidia-smi -c DEFAULT`",
    "CUDA_ERROR_STUB_LIBRARY": "this libcuda.so.1 is the toolkit's stub: take its folder out of LD_LIBRARY_PATH",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "libcuda and the kernel module differ: reboot after a driver's update",
    "CUDA_ERROR_SYSTEM_NOT_READY": "start nvidia-fabricmanager, which GPUs behind NVSwitch need",
    "CUDA_ERROR_OPERATING_SYSTEM": "check that the service or container may open /dev/nvidia*",
    "CUDA_ERROR_UNKNOWN": "check that the service or container may open /dev/nvidia*, /dev/nvidia-uvm too",
    **dict.fromkeys(_LOST, _RESTART),
}


def call(name: str, *arguments: object) -> Any:
    """Calls the driver's `name`; returns its result, a tuple if there are several.

    Raises:
        DeviceError: the call failed.
        Unavailable: `NO_DEVICE`, there is no cuda-bindings, no driver, or this call is not in it.

    """
    function = getattr(api(), name, None)
    if function is None:
        raise _lacking(name, "not in cuda-bindings")
    try:
        result, *values = function(*arguments)
    except RuntimeError as error:  # cuda-bindings' own class for it is private
        raise _lacking(name, str(error)) from error
    check(result, name)
    return values[0] if len(values) == 1 else tuple(values)


def check(result: int, name: str) -> None:
    """Raises the error for the result of a call, unless it is success.

    Raises:
        DeviceError: the call failed.

    """
    if result == 0:
        return
    try:
        known = api().CUresult(result)
    except ValueError as error:
        text = f"{name}: CUDA error {result}, which this cuda-bindings does not know; update it to learn more"
        raise DeviceError(ErrorCode.NO_DEVICE, text, str(result)) from error
    _, text = api().cuGetErrorString(known)
    code = ErrorCode.OVERLOADED if known.name == "CUDA_ERROR_OUT_OF_MEMORY" else ErrorCode.NO_DEVICE
    hint = f"; {_HINTS[known.name]}" if known.name in _HINTS else ""
    raise DeviceError(
        code,
        f"{name}: {known.name} ({text.decode() if text else 'no text'}){hint}",
        known.name,
        lost=known.name in _LOST,
    )


@functools.cache
def api() -> ModuleType:
    """`cuda.bindings.driver`, once the driver is loaded and ready; use it for its types and constants.

    Raises:
        DeviceError: the driver does not start.
        Unavailable: `NO_DEVICE`, there is no cuda-bindings or no driver.

    """
    try:
        from cuda.bindings import driver  # noqa: PLC0415 - takes 80 ms and is an extra
    except ImportError as error:
        text = f"pools on a GPU need cuda-bindings ({error}); pip install '.[cuda]' in a clone of kvd"
        raise refusal(ErrorCode.NO_DEVICE, text) from error
    try:
        (result,) = driver.cuInit(0)
    except RuntimeError as error:
        text = "no NVIDIA driver: libcuda.so.1 is not found; install the driver, or run the container with its GPUs"
        raise refusal(ErrorCode.NO_DEVICE, text) from error
    if result:  # `check` would load the driver again
        text = f"cuInit: {result.name}; {_HINTS.get(result.name, '`nvidia-smi` says more')}"
        raise DeviceError(ErrorCode.NO_DEVICE, text, result.name)
    return driver  # type: ignore[no-any-return]  # cuda-bindings has no types


def _lacking(name: str, reason: str) -> KvdError:
    text = f"the NVIDIA driver or cuda-bindings lacks {name} ({reason}); update the older of the two"
    return refusal(ErrorCode.NO_DEVICE, text)
