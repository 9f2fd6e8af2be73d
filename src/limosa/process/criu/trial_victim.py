"""What the trial dumps and restores: a small process of everything that has been seen to trip a CRIU.

A thread, a child, a listening and a connected inet socket, a unix socket and a memfd. In each round the parent sends
a number to the child over TCP and over the unix socket, gets it back, sees that the thread counts and that the memfd
holds what was written, and appends a line to the beat file (the only argument). It ends where anything is wrong, and
after a minute by itself.

Run by its path, with the standard library only, so that nothing of the caller's environment is in the trial.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import threading
import time

ROUND = 0.01  # seconds between rounds
LIFE = 60.0  # seconds after which it ends: a trial that was cut off leaves nothing behind for long


def child(sockets: list[socket.socket]) -> None:
    """Send back what comes, until the parent is gone."""
    while True:
        for connection in sockets:
            number = connection.recv(8, socket.MSG_WAITALL)
            if len(number) < 8:
                os._exit(0)
            connection.sendall(number)


def main(path: str) -> None:
    """Run rounds until the end."""
    listener = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(listener.getsockname())
    served, _ = listener.accept()
    near, far = socket.socketpair()
    memory = os.memfd_create("limosa-trial")
    os.ftruncate(memory, 1 << 16)
    if os.fork() == 0:
        client.close()
        near.close()
        child([served, far])
    served.close()
    far.close()
    ticks = [0]

    def tick() -> None:
        while True:
            ticks[0] += 1
            time.sleep(ROUND / 4)

    threading.Thread(target=tick, daemon=True).start()
    beat = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    end = time.monotonic() + LIFE
    number = 0
    while time.monotonic() < end:
        number += 1
        raw = struct.pack("<q", number)
        before = ticks[0]
        os.pwrite(memory, raw, number % 8192 * 8)
        for connection in (client, near):
            connection.sendall(raw)
            if connection.recv(8, socket.MSG_WAITALL) != raw:
                sys.exit(f"round {number}: another number came back")
        time.sleep(ROUND)
        if ticks[0] == before:
            time.sleep(0.5)
            if ticks[0] == before:
                sys.exit(f"round {number}: the thread stands still")
        if os.pread(memory, 8, number % 8192 * 8) != raw or listener.getsockname()[1] == 0:
            sys.exit(f"round {number}: the memfd or the listening socket is not what it was")
        os.write(beat, b"%d\n" % number)


if __name__ == "__main__":
    main(sys.argv[1])
