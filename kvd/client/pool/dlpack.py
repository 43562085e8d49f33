"""A GPU's bytes as a DLPack capsule, for frameworks that do not read `__cuda_array_interface__`.

Written here because the capsules of cuda-core and of torch come with those packages, which a worker need not have.
"""

import ctypes
from typing import Any, Final

CUDA: Final = 2
"""DLPack's number for CUDA devices."""
_UNSIGNED: Final = 1
_NAME: Final = b"dltensor"


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    pass


_Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(_Managed))
_Managed._fields_ = (("tensor", _Tensor), ("manager_context", ctypes.c_void_p), ("deleter", _Deleter))
_Destructor = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

_new = ctypes.pythonapi.PyCapsule_New
_new.restype = ctypes.py_object
_new.argtypes = (ctypes.c_void_p, ctypes.c_char_p, _Destructor)
_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.argtypes = (ctypes.c_void_p, ctypes.c_char_p)
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype = ctypes.c_void_p
_pointer.argtypes = (ctypes.c_void_p, ctypes.c_char_p)

_alive: dict[int, tuple[_Managed, object, object]] = {}
"""By address, what a consumer still uses: the structure, its shape, and the owner of the memory."""


def capsule(owner: object, address: int, size: int, ordinal: int) -> Any:
    """`size` bytes (uint8 [size]) at `address` of the CUDA device `ordinal`; `owner` lives until they are let go."""
    shape = (ctypes.c_int64 * 1)(size)
    tensor = _Tensor(address, CUDA, ordinal, 1, _UNSIGNED, 8, 1, ctypes.cast(shape, ctypes.POINTER(ctypes.c_int64)))
    managed = _Managed(tensor, None, _deleter)
    key = ctypes.addressof(managed)
    _alive[key] = managed, shape, owner
    return _new(key, _NAME, _destructor)


def _let_go(managed: Any) -> None:
    """The consumer is done."""
    del _alive[ctypes.addressof(managed.contents)]


def _drop(capsule_address: int) -> None:
    """The capsule is gone; whoever consumed it has renamed it and calls the deleter, else nobody does."""
    if _is_valid(capsule_address, _NAME):
        del _alive[_pointer(capsule_address, _NAME)]


_deleter = _Deleter(_let_go)
_destructor = _Destructor(_drop)
