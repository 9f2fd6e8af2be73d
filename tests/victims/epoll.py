"""epoll over a pipe, an eventfd, a timerfd and a signalfd."""

import ctypes
import os
import select
import signal
import struct

from common import loop

libc = ctypes.CDLL(None, use_errno=True)
reader, writer = os.pipe()
event = libc.eventfd(0, 0)
timer = libc.timerfd_create(1, 0)
once = struct.pack("4q", 0, 0, 0, 5_000_000)  # a periodic one that has expired unread comes back disarmed from CRIU
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
signals = libc.signalfd(-1, struct.pack("Q", 1 << (signal.SIGUSR1 - 1)), 0)
assert min(event, timer, signals) >= 0
poller = select.epoll()
for fd in (reader, event, timer, signals):
    poller.register(fd, select.EPOLLIN)
sizes = {reader: 1, event: 8, timer: 8, signals: 128}


def check(n):
    os.write(writer, b"x")
    os.write(event, (1).to_bytes(8, "little"))
    os.kill(os.getpid(), signal.SIGUSR1)
    libc.timerfd_settime(timer, 0, once, None)
    waiting = set(sizes)
    for _ in range(20):
        for fd, _mask in poller.poll(0.5):
            os.read(fd, sizes[fd])
            waiting.discard(fd)
        if not waiting:
            return
    raise AssertionError(f"no event on {waiting} at tick {n}")


loop(check)
