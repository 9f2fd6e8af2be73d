"""A POSIX message queue (mq_overview(7)) that holds one message while others go through."""

import ctypes
import os

from common import loop

libc = ctypes.CDLL(None, use_errno=True)
name = f"/limosa-test-{os.getpid()}".encode()
fd = libc.mq_open(name, os.O_RDWR | os.O_CREAT, 0o600, None)
assert fd >= 0, os.strerror(ctypes.get_errno())
libc.mq_unlink(name)  # at once: one that is left by a victim that is killed counts against RLIMIT_MSGQUEUE for ever
buffer = ctypes.create_string_buffer(8192)


def send(data, priority):
    assert libc.mq_send(fd, data, len(data), priority) == 0, os.strerror(ctypes.get_errno())


def receive():
    got = libc.mq_receive(fd, buffer, len(buffer), None)
    assert got >= 0, os.strerror(ctypes.get_errno())
    return buffer.raw[:got]


send(b"kept", 1)


def check(n):
    send(b"%d" % n, 5)
    assert receive() == b"%d" % n
    if n % 100 == 0:
        assert receive() == b"kept"
        send(b"kept", 1)


loop(check)
assert receive() == b"kept"
