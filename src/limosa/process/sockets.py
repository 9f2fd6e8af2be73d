"""Every socket of a network namespace and who its peer is, from ``sock_diag`` netlink (sock_diag(7)).

``/proc/net`` does not tell a unix socket's peer, ``sock_diag`` does. Where it cannot be had (module missing in a
container's kernel) ``/proc/PID/net`` is the second best, and peers of unix sockets are then unknown.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Iterator

import msgspec

from limosa.process.socket_entry import TCP_STATES, TYPES, Entry, address, proc_inet, proc_plain, proc_unix

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_NLM_F_REQUEST, _NLM_F_DUMP = 1, 0x300
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_UNIX_DIAG_NAME, _UNIX_DIAG_PEER, _UNIX_DIAG_ICONS, _UNIX_DIAG_RQLEN = 0, 2, 3, 4
_UDIAG_SHOW = 1 | 4 | 8 | 16  # name, peer, icons (connections not accepted yet), queue length
_CLONE_NEWNET = 0x40000000


class Table(msgspec.Struct):
    """All sockets of a network namespace by inode, with each connection's ends and each name's owner."""

    entries: dict[int, Entry] = msgspec.field(default_factory=dict)
    by_ends: dict[tuple[str, str, str], int] = msgspec.field(default_factory=dict)
    listeners: dict[str, int] = msgspec.field(default_factory=dict)
    pending_at: dict[int, int] = msgspec.field(default_factory=dict)

    def add(self, entry: Entry) -> None:
        """Take an entry in; sockets that nobody holds any more (inode 0) only as the far end of a connection."""
        if entry.protocol == "tcp" and entry.state != "listen" and entry.remote:
            self.by_ends[(entry.protocol, entry.local, entry.remote)] = entry.inode
        if entry.inode:
            self.entries[entry.inode] = entry
            if entry.state == "listen" and entry.protocol == "tcp":
                self.listeners[entry.local] = entry.inode
            for client in entry.pending:
                self.pending_at[client] = entry.inode

    def peer_of(self, entry: Entry) -> int:
        """Return the inode at the other end, 0 where there is none in this namespace.

        A connection that was not accepted yet counts as being with the listening socket.
        """
        if entry.family == "unix":
            return entry.peer or self.pending_at.get(entry.inode, 0)
        if entry.protocol != "tcp" or not entry.remote:
            return 0
        found = self.by_ends.get((entry.protocol, entry.remote, entry.local))
        if found == 0:  # known to the kernel, held by no process: in a listener's queue, or being closed
            port = entry.remote.rpartition(":")[2]
            for address in (entry.remote, f"0.0.0.0:{port}", f"[::]:{port}"):
                if address in self.listeners:
                    return self.listeners[address]
        return found or 0


def netlink_in(pid: int) -> socket.socket:
    """Return a sock_diag socket in the network namespace of a process."""

    def make() -> socket.socket:
        link = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG)
        link.settimeout(2)  # the kernel answers at once; nothing may wait here for ever
        return link

    if os.stat(f"/proc/{pid}/ns/net").st_ino == os.stat("/proc/self/ns/net").st_ino:
        return make()
    result: list[socket.socket] = []
    failure: list[OSError] = []

    def enter_and_make() -> None:
        # setns changes this thread only, and the thread ends right after: Limosa itself never leaves its namespace.
        libc = ctypes.CDLL(None, use_errno=True)
        fd = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            if libc.setns(fd, _CLONE_NEWNET) != 0:
                failure.append(OSError(ctypes.get_errno(), "setns"))
                return
            result.append(make())
        except OSError as error:
            failure.append(error)
        finally:
            os.close(fd)

    thread = threading.Thread(target=enter_and_make)
    thread.start()
    thread.join()
    if not result:
        raise failure[0] if failure else OSError("setns")
    return result[0]


def dump(link: socket.socket, request: bytes) -> Iterator[bytes]:
    """Send one sock_diag dump request and yield the payload of each answer."""
    link.send(
        struct.pack("=IHHII", 16 + len(request), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST | _NLM_F_DUMP, 1, 0) + request
    )
    while True:
        data = link.recv(1 << 18)
        offset = 0
        while offset + 16 <= len(data):
            length, kind = struct.unpack_from("=IH", data, offset)
            if kind == _NLMSG_DONE:
                return
            if kind == _NLMSG_ERROR:
                raise OSError(-struct.unpack_from("=i", data, offset + 16)[0], "sock_diag")
            yield data[offset + 16 : offset + length]
            offset += (length + 3) & ~3


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    offset = 0
    while offset + 4 <= len(data):
        length, kind = struct.unpack_from("=HH", data, offset)
        if length < 4:
            return
        yield kind, data[offset + 4 : offset + length]
        offset += (length + 3) & ~3


def _unix_entries(link: socket.socket) -> Iterator[Entry]:
    """Yield unix sockets (struct unix_diag_msg, linux/unix_diag.h)."""
    names: dict[int, str] = {}
    entries: list[Entry] = []
    for data in dump(link, struct.pack("=BBHIIIII", socket.AF_UNIX, 0, 0, 0xFFFFFFFF, 0, _UDIAG_SHOW, 0, 0)):
        _, kind, state, _, inode = struct.unpack_from("=BBBBI", data)
        entry = Entry(inode, "unix", TYPES.get(kind, str(kind)), "", TCP_STATES.get(state, str(state)))
        for attribute, value in _attributes(data[16:]):
            if attribute == _UNIX_DIAG_NAME:
                text = value[1:] if value[:1] == b"\0" else value.rstrip(b"\0")
                entry.local = ("@" if value[:1] == b"\0" else "") + text.decode(errors="replace")
            elif attribute == _UNIX_DIAG_PEER:
                entry.peer = struct.unpack("=I", value)[0]
            elif attribute == _UNIX_DIAG_ICONS:
                entry.pending = [n for (n,) in struct.iter_unpack("=I", value) if n]
            elif attribute == _UNIX_DIAG_RQLEN and entry.state == "listen":
                entry.queued = struct.unpack_from("=I", value)[0]
        names[inode] = entry.local
        entries.append(entry)
    for entry in entries:
        entry.remote = names.get(entry.peer, "")
        yield entry


def _inet_entries(link: socket.socket, family: int, number: int, protocol: str) -> Iterator[Entry]:
    """Yield inet sockets of one family and protocol (struct inet_diag_msg, linux/inet_diag.h)."""
    name = "inet" if family == socket.AF_INET else "inet6"
    kind = {"tcp": "stream", "raw": "raw"}.get(protocol, "dgram")
    request = struct.pack("=BBBBI", family, number, 0, 0, 0xFFFFFFFF) + bytes(48)
    for data in dump(link, request):
        own_family, state = data[0], data[1]
        own_port, far_port = struct.unpack_from(">HH", data, 4)
        queue = struct.unpack_from("=I", data, 56)[0]
        inode = struct.unpack_from("=I", data, 68)[0]
        word = TCP_STATES.get(state, str(state))
        yield Entry(
            inode,
            name,
            kind,
            protocol,
            word,
            address(own_family, data[8:24], own_port),
            address(own_family, data[24:40], far_port) if far_port else "",
            queued=queue if word == "listen" and protocol == "tcp" else 0,
        )


def read_table(pid: int) -> Table:
    """Return every socket in the network namespace of a process.

    Args:
        pid: any process of that namespace.

    Returns:
        The table; what the kernel does not tell is left out, never guessed.
    """
    table = Table()
    with contextlib.ExitStack() as stack:
        link: socket.socket | None = None
        with contextlib.suppress(OSError):
            link = stack.enter_context(netlink_in(pid))
        entries = _either(link, _unix_entries, lambda: proc_unix(pid))
        for number, protocol in ((6, "tcp"), (17, "udp")):
            for family, suffix in ((socket.AF_INET, ""), (socket.AF_INET6, "6")):
                by_link = functools.partial(_inet_entries, family=family, number=number, protocol=protocol)
                entries += _either(link, by_link, functools.partial(proc_inet, pid, protocol + suffix, protocol))
    for protocol in ("udplite", "raw", "icmp"):
        for suffix in ("", "6"):
            entries += proc_inet(pid, protocol + suffix, protocol)
    for name, column in (("netlink", 9), ("packet", 8)):
        entries += proc_plain(pid, name, column)
    for entry in entries:
        table.add(entry)
    return table


def _either(
    link: socket.socket | None,
    by_link: Callable[[socket.socket], Iterable[Entry]],
    by_proc: Callable[[], Iterable[Entry]],
) -> list[Entry]:
    """What sock_diag says; where it cannot be asked, what ``/proc`` does."""
    if link is not None:
        with contextlib.suppress(OSError):
            return list(by_link(link))
    return list(by_proc())


def protocol_name(pid: int, fd: int) -> str:
    """Return the kernel's name for a socket that is in no table ("TCP" when never bound, "ALG", "AF_VSOCK"), or ""."""
    try:
        return os.getxattr(f"/proc/{pid}/fd/{fd}", "system.sockprotoname").rstrip(b"\0").decode(errors="replace")
    except OSError:
        return ""
