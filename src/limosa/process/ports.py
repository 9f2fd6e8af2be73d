"""Ports that a restore needs: whether they can be bound, who has them, and what closed connections have left on them.

A connection that was closed stays in the kernel for up to a minute (TIME-WAIT, or FIN-WAIT-2 where the other side has
not closed it). Nobody owns it any more, and yet it keeps its port from being bound if its socket had no
SO_REUSEADDR.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
from collections.abc import Iterable

import msgspec

from limosa.process.criu.bound import Bound
from limosa.process.peers import name_of
from limosa.process.socket_entry import TCP_STATES
from limosa.process.sockets import dump, netlink_in

_SOCK_DESTROY = 21
_NLM_F_REQUEST_ACK = 1 | 4
_NLMSG_ERROR = 2
_SO_REUSEPORT = 15
_IP_FREEBIND = 15
_TIMER_TIMEWAIT = 3
_NUMBERS = {"tcp": socket.IPPROTO_TCP, "udp": socket.IPPROTO_UDP}
_ANY = ("0.0.0.0", "::")  # noqa: S104 - compared with, never bound


class User(msgspec.Struct, frozen=True, kw_only=True):
    """A socket that has a port, or what is left of one.

    Attributes:
        state: as in :data:`TCP_STATES`.
        address: its own, as text; an IPv4 address mapped into IPv6 as IPv4.
        remote: "address:port" of the other side, or "".
        inode: of the socket; 0 where no process has it any more.
        seconds: until the kernel forgets it, where that is known.
        message: the kernel's own words, by which it is named again.
    """

    state: str
    address: str
    remote: str
    inode: int
    seconds: float | None
    message: bytes

    @property
    def is_remains(self) -> bool:
        """Whether it is a closed connection that nobody owns and that the kernel will forget by itself."""
        return self.inode == 0 and self.seconds is not None


def try_bind(bound: Bound) -> int:
    """Bind a socket as CRIU will (SO_REUSEADDR and SO_REUSEPORT set), close it again; 0, or the error number."""
    kind = socket.SOCK_STREAM if bound.protocol == "tcp" else socket.SOCK_DGRAM
    try:
        with socket.socket(bound.family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.setsockopt(socket.SOL_SOCKET, _SO_REUSEPORT, 1)
            if bound.family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(bound.v6only))
                probe.setsockopt(socket.IPPROTO_IP, _IP_FREEBIND, 1)
                scope = socket.if_nametoindex(bound.device) if bound.device else 0
                probe.bind((bound.address, bound.port, 0, scope))
            else:
                probe.bind((bound.address, bound.port))
    except OSError as error:
        return error.errno or errno.EINVAL
    return 0


def users(bound: Bound) -> list[User]:
    """Return the sockets that are in the way of binding one, as far as the kernel tells; TCP's remains among them."""
    # A look misses a connection that just goes from one of the kernel's tables to another.
    return _look_for_users(bound) or _look_for_users(bound)


def _look_for_users(bound: Bound) -> list[User]:
    found = []
    try:
        with contextlib.closing(netlink_in(os.getpid())) as link:
            for family in (socket.AF_INET, socket.AF_INET6):
                request = struct.pack("=BBBBI", family, _NUMBERS[bound.protocol], 0, 0, 0xFFFFFFFF) + bytes(48)
                for data in list(dump(link, request)):
                    if struct.unpack_from(">H", data, 4)[0] == bound.port:
                        user = _user(bytes(data[:72]))
                        if overlap(bound, user.address):
                            found.append(user)
    except OSError:  # no sock_diag in this kernel: nobody can be named
        pass
    return found


def destroy(remains: Iterable[User]) -> bool:
    """Have the kernel forget closed connections now (SOCK_DESTROY); False where it will not: not root, not built in."""
    try:
        with contextlib.closing(netlink_in(os.getpid())) as link:
            for user in remains:
                family, number = user.message[0], _NUMBERS["tcp"]
                request = struct.pack("=BBBBI", family, number, 0, 0, 0xFFFFFFFF) + user.message[4:52]
                link.send(struct.pack("=IHHII", 16 + len(request), _SOCK_DESTROY, _NLM_F_REQUEST_ACK, 1, 0) + request)
                answer = link.recv(1 << 16)
                kind = struct.unpack_from("=H", answer, 4)[0]
                code = -struct.unpack_from("=i", answer, 16)[0] if kind == _NLMSG_ERROR else 0
                if code not in (0, errno.ENOENT):  # gone by itself
                    return False
    except OSError:
        return False
    return True


def owners(inodes: Iterable[int]) -> dict[int, tuple[int, str]]:
    """Return pid and name of a process that has each socket; those that nobody may look for are left out."""
    wanted = {f"socket:[{inode}]": inode for inode in inodes if inode}
    found: dict[int, tuple[int, str]] = {}
    for name in os.listdir("/proc") if wanted else ():
        if not name.isdigit():
            continue
        with contextlib.suppress(OSError):
            for fd in os.listdir(f"/proc/{name}/fd"):
                with contextlib.suppress(OSError):
                    inode = wanted.get(os.readlink(f"/proc/{name}/fd/{fd}"))
                    if inode is not None:
                        found.setdefault(inode, (int(name), name_of(int(name))))
    return found


def _user(data: bytes) -> User:
    """A struct inet_diag_msg (linux/inet_diag.h)."""
    family, state, timer = data[0], data[1], data[2]
    (far_port,) = struct.unpack_from(">H", data, 6)
    expires, inode = struct.unpack_from("=I", data, 52)[0], struct.unpack_from("=I", data, 68)[0]
    return User(
        state=TCP_STATES.get(state, "bound"),
        address=_text(family, data[8:24]),
        remote=f"{_text(family, data[24:40])}:{far_port}" if far_port else "",
        inode=inode,
        seconds=expires / 1000 if timer == _TIMER_TIMEWAIT else None,
        message=data,
    )


def _text(family: int, raw: bytes) -> str:
    if family == socket.AF_INET6 and raw[:12] == bytes(10) + b"\xff\xff":
        family, raw = socket.AF_INET, raw[12:16]
    return socket.inet_ntop(family, raw[: 4 if family == socket.AF_INET else 16])


def overlap(bound: Bound, address: str) -> bool:
    """Whether two sockets of one port are in each other's way by their addresses."""
    ours, other = bound.address, address
    if ours.startswith("::ffff:") and "." in ours:
        ours = ours.removeprefix("::ffff:")
    if (":" in ours) == (":" in other):
        return ours == other or ours in _ANY or other in _ANY
    return (ours == "::" and not bound.v6only) or other == "::"
