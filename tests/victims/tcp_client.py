"""Holds a TCP connection to somebody outside (port: second argument), who echoes what it sends."""

import socket
import sys

from common import loop

peer = socket.create_connection(("127.0.0.1", int(sys.argv[2])))
peer.settimeout(20)


def check(n):
    peer.sendall(b"%08d" % n)
    assert peer.recv(64) == b"%08d" % n


loop(check)
