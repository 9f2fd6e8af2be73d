"""Listens without SO_REUSEADDR, as NCCL does, and closes what it has accepted first: that stays in TIME-WAIT.

Arguments: the folder, then the address of each listener. Once there is a file ``visit`` in the folder, each tick has a
visitor.
"""

import os
import socket
import sys

from common import folder, loop

servers = []
for address in sys.argv[2:]:
    server = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    server.bind((address, 0))
    server.listen(8)
    servers.append(server)


def visit(n):
    for server in servers:
        address, port = server.getsockname()[:2]
        client = socket.create_connection(({"0.0.0.0": "127.0.0.1", "::": "127.0.0.1"}.get(address, address), port))
        accepted, _ = server.accept()
        accepted.sendall(b"%d" % n)
        accepted.close()
        assert client.recv(64) + client.recv(64) == b"%d" % n
        client.close()


visit(0)
print("ports", *(server.getsockname()[1] for server in servers), flush=True)
loop(lambda n: visit(n) if os.path.exists(os.path.join(folder(), "visit")) else None)
