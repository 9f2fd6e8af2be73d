"""What CRIU leaves behind in the network: its nftables tables, and sockets in repair mode.

While it dumps connected sockets CRIU keeps packets away by a table ``inet CRIU-…`` and holds the sockets in TCP's
repair mode. A dump that ends the job leaves the table in place for the restore (otherwise the peer's packets would
reset the connection), and a CRIU that is killed leaves both; a socket in repair mode answers calls with EPERM.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
import socket
import subprocess
from collections.abc import Callable

from limosa import start
from limosa.errors import LimosaError, NoSuchProcess, PermissionDenied
from limosa.ipc import packet
from limosa.process.belief import owners_of
from limosa.process.criu.program import Criu
from limosa.process.identity import Identity
from limosa.process.namespaces import enter, in_a_thread
from limosa.process.openat import last_error, taken_from

TCP_REPAIR = 19  # linux/tcp.h
_libc = ctypes.CDLL(None, use_errno=True)
_MOST_SAID = 1 << 20
_MOST_MEMORY = 1 << 20  # KiB: nft takes half a MiB for each table that there is, and a container makes thousands
_BOUNDED = f'ulimit -v {_MOST_MEMORY} 2>/dev/null; exec "$@"'
_CLONE_NEWNET = 0x40000000
_OURS = re.compile(r"inet limosa-[0-9A-Za-z-]{1,60}")
_TABLE = re.compile(r"inet CRIU-[0-9A-Za-z-]{1,40}")


class NetworkError(LimosaError):
    """nftables could not be read or changed."""

    id, template = "network", "{detail}"


def tables(criu: Criu) -> list[str]:
    """Return the tables of CRIU runs that are there now, e.g. ``inet CRIU-1b4e28ba-2fa1-11d2-8``.

    Args:
        criu: whose ``nft`` to use.

    Raises:
        NetworkError: there is no ``nft``, or it failed.
        PermissionDenied: it may not look.
    """
    return [name for name in _all_tables(criu) if _TABLE.fullmatch(name)]


def _all_tables(criu: Criu) -> list[str]:
    said = _nft(criu, "--json", "list", "tables")
    if len(said) > _MOST_SAID:  # in a container's network they are whose it is
        raise NetworkError(detail="there are too many tables")
    found = [entry["table"] for entry in json.loads(said)["nftables"] if "table" in entry]
    return [f"{table['family']} {table['name']}" for table in found]


def remove_table(criu: Criu, name: str) -> bool:
    """Remove a table that CRIU left.

    Args:
        criu: whose ``nft`` to use.
        name: as :func:`tables` returns it; it may come from an image, so anything else is refused.

    Returns:
        Whether it was there.

    Raises:
        NetworkError: the name is not that of such a table, there is no ``nft``, or it failed.
        PermissionDenied: it may not be changed.
    """
    if not _TABLE.fullmatch(name):
        raise NetworkError(detail=f"{name!r} is not the name of a table of CRIU's")
    if name not in tables(criu):
        return False
    _nft(criu, "delete", "table", *name.split(" "))
    return True


def shut(criu: Criu, pid: int, name: str) -> None:
    """Let no packet in or out of a process's network, by a table there, until it goes or :func:`open_again`.

    A process that is held still answers nothing, but the kernel goes on telling its peers that it has their bytes.

    Args:
        criu: whose ``nft`` to use.
        pid: the process. The network must be its own, not the machine's.
        name: of the table: "limosa-" and what tells it from others.

    Raises:
        NetworkError, PermissionDenied: it cannot be done; nothing is there.
    """
    if not _OURS.fullmatch(f"inet {name}"):
        raise NetworkError(detail=f"{name!r} is not the name of a table of Limosa's")
    chains = "".join(
        f"chain {way} {{ type filter hook {way} priority -400; policy drop; }}; "
        for way in ("input", "output", "forward")
    )

    def add() -> None:
        _nft(criu, f"add table inet {name} {{ {chains}}}")

    _inside_of(pid, add)


def open_again(criu: Criu, pid: int) -> None:
    """Remove what :func:`shut`, or a CRIU that was killed, has left in a process's own network.

    Args:
        criu: whose ``nft`` to use.
        pid: the process.

    Raises:
        NetworkError, PermissionDenied: as :func:`tables`.
    """

    def remove() -> None:
        for name in _all_tables(criu):
            if _TABLE.fullmatch(name) or _OURS.fullmatch(name):
                _nft(criu, "delete", "table", *name.split(" "))

    _inside_of(pid, remove)


def _inside_of(pid: int, call: Callable[[], None]) -> None:
    """Make a call in a process's network; the programs that it starts are there, too.

    Raises:
        NetworkError: it has gone, or has the caller's own network.
    """

    def inside() -> None:
        own = os.stat("/proc/thread-self/ns/net")
        with open(f"/proc/{pid}/ns/net", "rb") as its:
            if os.path.samestat(own, os.fstat(its.fileno())):
                raise NetworkError(detail=f"process {pid} has no network of its own")
            enter(its.fileno(), _CLONE_NEWNET)
        call()

    try:
        in_a_thread(inside)
    except OSError as error:
        raise NetworkError(detail=f"the network of process {pid} cannot be entered: {error.strerror}") from error


def _nft(criu: Criu, *arguments: str) -> str:
    if criu.nft is None:
        raise NetworkError(
            detail="there is no nft program", hint="limosa doctor --fix fetches one, or install nftables"
        )
    try:
        done = start.run(["/bin/sh", "-c", _BOUNDED, "nft", *criu.nft, *arguments], capture_output=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NetworkError(detail=f"nft cannot be run: {error}") from None
    if done.returncode != 0:
        text = done.stderr.decode(errors="replace").strip()
        if "Operation not permitted" in text:
            raise PermissionDenied(detail=f"nftables (nft {' '.join(arguments)})")
        raise NetworkError(detail=f"nft {' '.join(arguments)}: {text}")
    return done.stdout.decode(errors="replace")


def leave_repair(pid: int) -> int:
    """Take every TCP socket of a living process out of repair mode.

    Each socket is fetched by pidfd_getfd(2) and given TCP_REPAIR = 0 (tcp(7)); the process itself is not stopped.

    Args:
        pid: the process. Its descendants are not looked at; sockets it shares with them are the same.

    Returns:
        How many sockets were in repair mode.

    Raises:
        NoSuchProcess: it is gone.
        PermissionDenied: no right to take its descriptors (ptrace) or to change them (CAP_NET_ADMIN).
    """
    return _set_repair(pid, wanted=False)


def enter_repair(pid: int) -> int:
    """Put every connected TCP socket of a living process into repair mode: closed in that, it tells its peer nothing.

    Args:
        pid: the process. It must be held still: it would see EPERM.

    Returns:
        How many sockets were put there.

    Raises:
        NoSuchProcess, PermissionDenied: as :func:`leave_repair`.
    """
    return _set_repair(pid, wanted=True)


def _set_repair(pid: int, *, wanted: bool) -> int:
    Identity.of(pid)
    count = 0
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        raise NoSuchProcess(pid=pid) from None
    try:
        uid = max(owners_of(pid))
        for name in os.listdir(f"/proc/{pid}/fd"):
            try:
                if not os.readlink(f"/proc/{pid}/fd/{name}").startswith("socket:"):
                    continue
            except FileNotFoundError:
                continue
            try:
                fd = taken_from(pidfd, int(name))
            except OSError as error:
                if error.errno == errno.EBADF:  # closed since
                    continue
                raise
            count += _switch(fd, uid, wanted)
    except FileNotFoundError:
        raise NoSuchProcess(pid=pid) from None
    except ProcessLookupError:
        raise NoSuchProcess(pid=pid) from None
    except PermissionError as error:
        what = f"putting the sockets of process {pid} into" if wanted else f"taking the sockets of process {pid} out of"
        raise PermissionDenied(detail=f"{what} repair mode: {error}") from None
    finally:
        os.close(pidfd)
    return count


def _switch(fd: int, uid: int, wanted: bool) -> bool:
    """Put one of its sockets into repair mode, or take it out, and let go of it; False where there was nothing to do.

    The process may have put anything in its place. Whatever it is, nobody waits until it is closed: that may be never,
    where it is on a file system of its user's (FUSE) or lingers (SO_LINGER).
    """
    try:
        family = _option(fd, socket.SOL_SOCKET, socket.SO_DOMAIN)
        if family not in (socket.AF_INET, socket.AF_INET6):
            return False
        if _option(fd, socket.SOL_SOCKET, socket.SO_PROTOCOL) != socket.IPPROTO_TCP:
            return False
        if _option(fd, socket.IPPROTO_TCP, TCP_REPAIR) != (not wanted):
            return False
        if wanted and _option(fd, socket.SOL_SOCKET, socket.SO_ACCEPTCONN):  # it listens, and has no peer
            return False
        if _libc.setsockopt(fd, socket.IPPROTO_TCP, TCP_REPAIR, ctypes.byref(ctypes.c_int(wanted)), 4):
            raise last_error()
        return True
    finally:
        packet.let_go(fd, uid)


def _option(fd: int, level: int, name: int) -> int:
    """One of a socket's options, by getsockopt(2) alone: Python's own socket asks for its name as well.

    For that the kernel wants the socket's lock, which a thread of its user's may hold for ever. -1: it is no socket.
    """
    value, size = ctypes.c_int(-1), ctypes.c_uint(4)
    if _libc.getsockopt(fd, level, name, ctypes.byref(value), ctypes.byref(size)):
        error = last_error()
        if error.errno in (errno.ENOTSOCK, errno.EBADF, errno.ENOPROTOOPT, errno.EOPNOTSUPP):
            return -1
        raise error
    return value.value
