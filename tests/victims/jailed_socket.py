"""A socket that was bound in a root folder of its own: its name is one outside as well (the second argument)."""

import os
import socket
import sys

from common import folder, loop

name, owner = sys.argv[2], int(sys.argv[3])
ours, theirs = socket.socketpair()
pid = os.fork()
if not pid:
    jail = os.path.join(folder(), "jail")
    os.makedirs(jail + os.path.dirname(name))
    os.chroot(jail)
    bound = socket.create_server(name, family=socket.AF_UNIX)
    os.chown(name, owner, owner)
    socket.send_fds(theirs, [b"x"], [bound.fileno()])
    os._exit(0)
kept = socket.recv_fds(ours, 1, 1)[1]
os.waitpid(pid, 0)
ours.close()
theirs.close()
loop()
