"""Same-host copies (CMA): whether one process may see another and read its memory."""

import ctypes
import os
from pathlib import Path

from kvd.doctor.finding import Finding, Level

_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
_INITIAL_PID_NAMESPACE = "pid:[4026531836]"
_SECRET = b"read by another process"
_YAMA_FIX = "sysctl kernel.yama.ptrace_scope=0, or CAP_SYS_PTRACE for the daemons (deploy/systemd/drop-ins/cma.conf)"


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def check_copy() -> Finding:
    """Lets a process that is not our parent read our memory, as a peer's daemon would."""
    content = ctypes.create_string_buffer(_SECRET)
    owner = os.getpid()
    child = os.fork()
    if child == 0:
        os._exit(_read_from(owner, ctypes.addressof(content)))
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status == 0:
        return Finding("same-host copy", Level.OK, "process_vm_readv between processes of this user works")
    scope = _YAMA.read_text(encoding="ascii").strip() if _YAMA.exists() else "0"
    reason = os.strerror(status) if status > 0 else f"signal {-status}"
    text = f"process_vm_readv fails ({reason}), ptrace_scope is {scope}: same-host peers copy twice, by shared memory"
    fix = _YAMA_FIX if scope != "0" else "allow process_vm_readv in the seccomp profile, or give CAP_SYS_PTRACE"
    return Finding("same-host copy", Level.SLOW, text, fix)


def check_pid_namespace() -> Finding:
    """Which PID namespace this is: daemons need the same one to read each other's memory by process id."""
    if os.readlink("/proc/self/ns/pid") == _INITIAL_PID_NAMESPACE:
        return Finding("PID namespace", Level.OK, "the host's")
    return Finding(
        "PID namespace",
        Level.NOTE,
        "not the host's: daemons outside are reached over TCP or RDMA if `listen` is tcp://, else not at all",
        "for copies between pods of one node: hostPID: true on both; within a pod: shareProcessNamespace: true",
    )


def _read_from(owner: int, address: int) -> int:
    """0 if the copy arrived, else an errno."""
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(len(_SECRET))
    local = _IoVec(ctypes.addressof(buffer), len(_SECRET))
    remote = _IoVec(address, len(_SECRET))
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    arguments = (ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
    if libc.process_vm_readv(owner, *map(_as_word, arguments)) != len(_SECRET):
        return ctypes.get_errno() or 1
    return 0 if buffer.raw == _SECRET else 1


def _as_word(argument: object) -> object:
    """Plain integers as unsigned words: the last argument of the call is an unsigned long."""
    return ctypes.c_ulong(argument) if isinstance(argument, int) else argument
