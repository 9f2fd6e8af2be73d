"""Giving up root: what a process keeps of whoever started it beyond its user id, each taken away.

A user owns the processes that root starts for him (his vault and mover, his ``recover``): he may trace them, and so has
whatever they have. Terminal, descriptors, working folder and environment are :mod:`limosa.start`'s business.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import pwd
import resource

_KEYCTL = {"x86_64": 250, "aarch64": 219, "ppc64le": 271}
_JOIN_SESSION_KEYRING = 1
_PR_SET_DUMPABLE, _PR_CAP_AMBIENT, _CLEAR_ALL = 4, 47, 4
_CAPABILITY_VERSION_3 = 0x20080522
_libc = ctypes.CDLL(None, use_errno=True)


def become(uid: int) -> None:
    """Become a user for good, with his groups and nothing of root's.

    Raises:
        OSError: it may not be that user, or rights would be left.
    """
    try:
        user = pwd.getpwuid(uid)
        os.initgroups(user.pw_name, user.pw_gid)
        group = user.pw_gid
    except KeyError:
        os.setgroups([])
        group = uid
    with contextlib.suppress(OSError), open("/proc/self/loginuid", "wb", 0) as file:
        file.write(b"%d" % uid)  # what the user makes of it is not to be root's deed in the audit log
    os.setresgid(group, group, group)
    os.setresuid(uid, uid, uid)
    settle()


def settle() -> None:
    """Take away what a process has kept after its user was changed.

    Nothing is imported here, and no text decoded: Python's own files may be out of the user's reach.
    The process may be traced again from the middle of this on: first goes what is secret.

    - the session keyring (Kerberos tickets, keys of encrypted disks): a new, empty one, of the user's;
    - capabilities that odd securebits or an ambient set would have carried over;
    - protection from the kernel's OOM killer, a better priority, real-time scheduling and the right to them;
    - core dumps, and a mask that lets others read or write.

    Raises:
        PermissionError: capabilities are left.
    """
    if (number := _KEYCTL.get(platform.machine())) is not None:
        _libc.syscall(number, _JOIN_SESSION_KEYRING, None)  # where keyrings are forbidden there is none to be had
    _libc.prctl(_PR_CAP_AMBIENT, _CLEAR_ALL, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    if _libc.capset(header, (ctypes.c_uint32 * 6)()) != 0:
        raise PermissionError(ctypes.get_errno(), "capabilities cannot be given up")
    # What changes its user loses its own /proc/self otherwise, which libcuda reads.
    _libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)
    with contextlib.suppress(OSError):
        if os.sched_getscheduler(0) not in (os.SCHED_OTHER, os.SCHED_BATCH, os.SCHED_IDLE):
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    with contextlib.suppress(OSError):
        if os.getpriority(os.PRIO_PROCESS, 0) < 0:
            os.setpriority(os.PRIO_PROCESS, 0, 0)
    with contextlib.suppress(OSError, ValueError), open("/proc/self/oom_score_adj", "r+b", 0) as file:
        if int(file.read()) < 0:
            file.seek(0)
            file.write(b"0")
    for limit in (resource.RLIMIT_CORE, resource.RLIMIT_RTPRIO, resource.RLIMIT_NICE):
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(limit, (0, 0))
    os.umask(0o077)
