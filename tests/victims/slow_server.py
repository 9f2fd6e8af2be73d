"""Listens, and accepts nobody before the file "accept" is there."""

import os
import socket

from common import folder, loop

server = socket.create_server(("127.0.0.1", 0))
server.setblocking(False)
with open(os.path.join(folder(), "port"), "w") as file:
    file.write(str(server.getsockname()[1]))


def check(n):
    if not os.path.exists(os.path.join(folder(), "accept")):
        return
    try:
        client, _ = server.accept()
    except BlockingIOError:
        return
    client.sendall(b"hello")
    client.close()


loop(check)
