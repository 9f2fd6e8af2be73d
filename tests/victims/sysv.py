"""Holds a System V shared memory segment, which CRIU cannot dump in the host's IPC namespace."""

import ctypes

from common import loop

libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p
segment = libc.shmget(0, 4096, 0o1600)  # IPC_PRIVATE, IPC_CREAT
assert segment >= 0
assert libc.shmat(segment, None, 0)
libc.shmctl(segment, 0, None)  # IPC_RMID: gone with its last user
loop()
