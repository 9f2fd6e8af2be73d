"""A datagram socket that sends to a name, as a program's that logs to /dev/log; the name is the second argument."""

import socket
import sys
import time

from common import loop

sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
while True:
    try:
        sender.connect(sys.argv[2])
        break
    except OSError:
        time.sleep(0.01)
sender.setblocking(False)


def check(n):
    try:
        sender.send(b"tick %d" % n)
    except BlockingIOError:  # nobody has read for a while
        pass


loop(check)
