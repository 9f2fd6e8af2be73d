"""System V shared memory, a semaphore and a message queue in an IPC namespace of its own: each has what was counted."""

import ctypes

from common import loop

CREAT, SETVAL, GETVAL, NOWAIT = 0o1000, 16, 12, 0o4000
libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p


def do(result):
    assert result not in (None, -1), ctypes.get_errno()
    return result


class Message(ctypes.Structure):
    _fields_ = (("type", ctypes.c_long), ("count", ctypes.c_long))


do(libc.unshare(0x08000000))  # CLONE_NEWIPC
segment, semaphore, queue = do(libc.shmget(1, 4096, CREAT)), do(libc.semget(2, 1, CREAT)), do(libc.msgget(3, CREAT))
held = ctypes.c_long.from_address(do(libc.shmat(segment, None, 0)))


def check(n):
    message = Message(1, n)
    if n > 1:
        assert (libc.shmget(1, 0, 0), libc.semget(2, 0, 0), libc.msgget(3, 0)) == (segment, semaphore, queue)
        assert (held.value, libc.semctl(semaphore, 0, GETVAL)) == (n - 1, (n - 1) % 1000)
        do(libc.msgrcv(queue, ctypes.byref(message), 8, 0, NOWAIT))
        assert message.count == n - 1
    held.value = message.count = n
    do(libc.semctl(semaphore, 0, SETVAL, n % 1000))
    do(libc.msgsnd(queue, ctypes.byref(message), 8, NOWAIT))


loop(check)
