"""Two processes that send each other numbers over TCP, and wait where their sockets are in repair mode for a while.

A CRIU that is killed in the middle leaves connected sockets in repair mode: what is received is EPERM, what is sent
EINVAL, until somebody ends that. Numbers go one by one, so that none can be lost or doubled unseen.
"""

import errno
import os
import signal
import socket
import time

from common import loop

listening = socket.create_server(("127.0.0.1", 0))


def patiently(call, argument):
    until = time.monotonic() + 60
    while True:
        try:
            return call(argument)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EINVAL) or time.monotonic() > until:
                raise
            time.sleep(0.005)


child = os.fork()
if child == 0:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    connected = socket.create_connection(listening.getsockname())
    listening.close()
    while data := patiently(connected.recv, 8):
        assert len(data) == 8
        assert patiently(connected.send, data) == 8
    os._exit(0)
peer, _ = listening.accept()


def check(n):
    message = b"%08d" % n
    assert patiently(peer.send, message) == 8
    assert patiently(peer.recv, 8) == message


loop(check)
peer.close()
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
