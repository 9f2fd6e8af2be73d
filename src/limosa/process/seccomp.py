"""A seccomp filter that answers ``io_uring_setup`` with ENOSYS, as on a kernel that was built without io_uring.

CRIU cannot dump an io_uring, and libuv (inside torchrun's TCPStore) opens one where it can and falls back to epoll
where it cannot. The filter is inherited by fork and exec and is dumped and restored by CRIU. Everything else passes,
also calls by another ABI of the same kernel (i386 and x32 on x86_64), which nothing that uses io_uring speaks.

Imports nothing but the standard library: the trampoline loads this file before exec, without the package.
Sources: seccomp(2), linux/seccomp.h, linux/bpf_common.h, linux/audit.h.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform

_LD_W_ABS, _JEQ_K, _RET_K = 0x20, 0x15, 0x06  # BPF_LD|BPF_W|BPF_ABS, BPF_JMP|BPF_JEQ|BPF_K, BPF_RET|BPF_K
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000  # SECCOMP_RET_ALLOW, SECCOMP_RET_ERRNO
_NR, _ARCH = 0, 4  # offsets in struct seccomp_data
_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, _PR_SET_NO_NEW_PRIVS = 22, 2, 38

IO_URING_SETUP = 425
"""The call's number, the same on every architecture (calls from 424 on are numbered alike)."""

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""What ``seccomp_data.arch`` holds, by ``platform.machine()``."""


class _Instruction(ctypes.Structure):
    """``struct sock_filter``."""

    _fields_ = (("code", ctypes.c_uint16), ("jt", ctypes.c_uint8), ("jf", ctypes.c_uint8), ("k", ctypes.c_uint32))


class _Program(ctypes.Structure):
    """``struct sock_fprog``."""

    _fields_ = (("len", ctypes.c_uint16), ("filter", ctypes.POINTER(_Instruction)))


def program(machine: str) -> list[tuple[int, int, int, int]]:
    """The filter as (code, jump if true, jump if false, operand) for ``platform.machine()``.

    Raises:
        NotImplementedError: the architecture's number is not known here.
    """
    if machine not in AUDIT_ARCH:
        raise NotImplementedError(f"no seccomp filter for {machine}")
    return [
        (_LD_W_ABS, 0, 0, _ARCH),
        (_JEQ_K, 0, 3, AUDIT_ARCH[machine]),  # another ABI: let it pass
        (_LD_W_ABS, 0, 0, _NR),
        (_JEQ_K, 0, 1, IO_URING_SETUP),  # x32 sets bit 30 and so never matches
        (_RET_K, 0, 0, _ERRNO | errno.ENOSYS),
        (_RET_K, 0, 0, _ALLOW),
    ]


def deny_io_uring() -> bool:
    """Puts the filter on the calling thread, for good, and on all that it starts.

    Without CAP_SYS_ADMIN the kernel wants no_new_privs first, which also takes the effect from set-user-id programs
    (sudo, ping) for the rest of the process's life.

    Returns:
        Whether no_new_privs had to be set.

    Raises:
        OSError: the kernel refuses filters.
        NotImplementedError: unknown architecture.
    """
    code = program(platform.machine())
    array = (_Instruction * len(code))(*(_Instruction(*instruction) for instruction in code))
    fprog = _Program(len(code), array)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong]

    def install() -> int:
        failed = libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(fprog), 0, 0)
        return ctypes.get_errno() if failed else 0

    number, no_new_privs = install(), False
    if number == errno.EACCES:
        if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, None, 0, 0):
            number = ctypes.get_errno()
        else:
            number, no_new_privs = install(), True
    if number:
        raise OSError(number, f"seccomp filter: {os.strerror(number)}")
    return no_new_privs
