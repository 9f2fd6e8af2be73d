"""A socket as the kernel shows it, and reading ``/proc/PID/net`` if ``sock_diag`` is not available."""

from __future__ import annotations

import contextlib
import itertools
import socket
import struct
from collections.abc import Iterator

import msgspec

TYPES = {1: "stream", 2: "dgram", 3: "raw", 5: "seqpacket", 10: "packet"}
TCP_STATES = {
    1: "established",
    2: "syn-sent",
    3: "syn-received",
    4: "fin-wait-1",
    5: "fin-wait-2",
    6: "time-wait",
    7: "close",
    8: "close-wait",
    9: "last-ack",
    10: "listen",
    11: "closing",
    12: "syn-received",
}


class Entry(msgspec.Struct):
    """A socket of a network namespace, in the words of :class:`SocketObservation`.

    Attributes:
        peer: inode of a unix socket's peer, 0 for none.
        pending: inodes of clients that wait to be accepted by a unix socket.
    """

    inode: int
    family: str
    type: str
    protocol: str
    state: str
    local: str = ""
    remote: str = ""
    peer: int = 0
    peer_known: bool = True
    queued: int = 0
    pending: list[int] = msgspec.field(default_factory=list)


def address(family: int, raw: bytes, port: int) -> str:
    """Return "a.b.c.d:port" or "[v6]:port"; an IPv4 address mapped into IPv6 is written as IPv4."""
    if family == socket.AF_INET6 and raw[:12] == bytes(10) + b"\xff\xff":
        family, raw = socket.AF_INET, raw[12:16]
    if family == socket.AF_INET:
        return f"{socket.inet_ntop(socket.AF_INET, raw[:4])}:{port}"
    return f"[{socket.inet_ntop(socket.AF_INET6, raw[:16])}]:{port}"


def proc_inet(pid: int, name: str, protocol: str) -> Iterator[Entry]:
    """Yield the sockets in ``/proc/PID/net/NAME`` ("tcp", "udp6", …; proc(5)); none where there is no such file."""
    family = socket.AF_INET6 if name.endswith("6") else socket.AF_INET

    def end(text: str) -> tuple[str, int]:
        host, _, port = text.partition(":")
        raw = b"".join(struct.pack("=I", int(host[i : i + 8], 16)) for i in range(0, len(host), 8))
        return address(family, raw, int(port, 16)), int(port, 16)

    try:
        with open(f"/proc/{pid}/net/{name}", encoding="ascii") as file:
            lines = file.read().splitlines()[1:]
    except OSError:
        return
    for line in lines:
        fields = line.split()
        (own, _), (far, far_port) = end(fields[1]), end(fields[2])
        state = TCP_STATES.get(int(fields[3], 16), fields[3])
        kind = {"tcp": "stream", "raw": "raw"}.get(protocol, "dgram")
        queued = int(fields[4].partition(":")[2], 16) if state == "listen" else 0
        yield Entry(
            int(fields[9]), "inet6" if family == socket.AF_INET6 else "inet", kind, protocol, state, own,
            far if far_port else "", queued=queued,
        )  # fmt: skip


def proc_unix(pid: int) -> Iterator[Entry]:
    """Yield the sockets in ``/proc/PID/net/unix``, which does not tell their peers.

    A name may have line breaks in it: what follows one is passed over where it does not look like a socket.
    """
    name = f"/proc/{pid}/net/unix"
    with contextlib.suppress(OSError), open(name, encoding="utf-8", errors="replace", newline="\n") as file:
        for line in itertools.islice(file, 1, None):
            fields = line.rstrip("\n").split(None, 7)
            try:
                flags, kind, state, inode = int(fields[3], 16), int(fields[4], 16), int(fields[5], 16), int(fields[6])
            except (ValueError, IndexError):
                continue
            word = "listen" if flags & 0x10000 else {3: "established"}.get(state, "close")
            path = fields[7] if len(fields) > 7 else ""
            yield Entry(inode, "unix", TYPES.get(kind, "stream"), "", word, path, peer_known=False)


def proc_plain(pid: int, name: str, column: int) -> Iterator[Entry]:
    """Yield the inodes in a column of ``/proc/PID/net/NAME`` ("netlink", "packet"), of which no more is needed."""
    try:
        with open(f"/proc/{pid}/net/{name}", encoding="ascii") as file:
            for line in file.read().splitlines()[1:]:
                yield Entry(int(line.split()[column]), name, "raw", "", "close")
    except OSError:
        return
