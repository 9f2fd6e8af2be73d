"""A short-lived process that connects to a shim in a user namespace of the caller's own, and hands the socket back."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence

from limosa.process.namespaces import CLONE_NEWNET, CLONE_NEWUSER, enter
from limosa.process.openat import closing


def main(arguments: Sequence[str]) -> int:
    """Connect, and send the connection over standard input, or the number of what went wrong.

    Args:
        arguments: the process, the name without its first byte, seconds.
    """
    pid, name, seconds = arguments
    with socket.socket(fileno=os.dup(0)) as back:
        try:
            flags = os.O_RDONLY | os.O_CLOEXEC
            with (
                closing(os.open(f"/proc/{pid}/ns/user", flags)) as user,
                closing(os.open(f"/proc/{pid}/ns/net", flags)) as net,
            ):
                if not os.path.samestat(os.fstat(user), os.stat("/proc/self/ns/user")):
                    enter(user, CLONE_NEWUSER)
                enter(net, CLONE_NEWNET)
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as connection:
                connection.settimeout(float(seconds))
                connection.connect(f"\0{name}")
                connection.setblocking(True)
                socket.send_fds(back, [b"0"], [connection.fileno()])
        except OSError as error:
            back.send(str(error.errno or 0).encode())
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
