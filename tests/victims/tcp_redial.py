"""Talks to an echo server outside (port: second argument) and dials again where the connection has been closed."""

import socket
import sys

from common import loop


def dial():
    found = socket.create_connection(("127.0.0.1", int(sys.argv[2])))
    found.settimeout(20)
    return found


peer = dial()


def check(n):
    global peer
    for _ in range(2):
        try:
            peer.sendall(b"%08d" % n)
            if peer.recv(64) == b"%08d" % n:
                return
        except OSError:
            pass
        print("redial", flush=True)
        peer.close()
        peer = dial()
    raise AssertionError(f"no answer at tick {n}")


loop(check)
