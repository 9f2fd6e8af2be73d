"""One packet between processes that must not believe each other: bounded in bytes, descriptors and time.

:func:`receive` reads and :func:`send` writes every connection of the shim, the vault and the mover. Anything that was
not asked for is :class:`Wrong`; nothing of it stays open here.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import fcntl
import os
import socket
import stat
import struct
import threading
import time
from collections.abc import Iterable, Sequence
from types import TracebackType

_SPACES = 4 << 10
_MOST_RIGHTS = 253
"""As many descriptors as may come in a packet (SCM_MAX_FD)."""
_CREDENTIALS = struct.Struct("3i")
_AT_EMPTY_PATH, _AT_STATX_DONT_SYNC, _STATX_TYPE = 0x1000, 0x4000, 1
_MODE_AT, _INODE_AT, _DEVICE_AT = 28, 32, 136  # of a struct statx of 256 bytes; the device is major and minor
FUSE = "/sys/fs/fuse/connections"
_libc = ctypes.CDLL(None, use_errno=True)


class Wrong(ValueError):
    """What has come is no right answer."""


class Deadline:
    """A moment until which all of something has to be over, however many packets it takes.

    Args:
        seconds: from now on.
        within: another moment that counts as well.
    """

    def __init__(self, seconds: float, within: Deadline | None = None):
        self._end = time.monotonic() + seconds
        if within is not None:
            self._end = min(self._end, within._end)

    @property
    def over(self) -> bool:
        """Whether it has passed."""
        return time.monotonic() >= self._end

    def left(self) -> float:
        """Return how many seconds are left.

        Raises:
            TimeoutError: none.
        """
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError(errno.ETIMEDOUT, "timed out")
        return left


def close_all(fds: Iterable[int]) -> None:
    """Close descriptors; one that cannot be closed keeps none of the others open."""
    with contextlib.ExitStack() as stack:
        for fd in fds:
            stack.callback(os.close, fd)


class Given:
    """Descriptors that have come: closed at the end of the block, but for what was taken by then."""

    def __init__(self, fds: Iterable[int] = ()):
        self._fds = list(fds)

    def __len__(self) -> int:
        return len(self._fds)

    @property
    def fds(self) -> tuple[int, ...]:
        """Those that are there, which stay ours."""
        return tuple(self._fds)

    def take(self) -> list[int]:
        """Return all of them, which are the caller's to close from here on."""
        found, self._fds = self._fds, []
        return found

    def add(self, more: Given) -> None:
        """Have those of another one, too."""
        self._fds += more.take()

    def close(self) -> None:
        """Close what was not taken."""
        close_all(self.take())

    def __enter__(self) -> Given:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def send(connection: socket.socket, parts: Sequence[bytes], fds: Sequence[int] = ()) -> None:
    """Send one packet with descriptors, which stay ours (SCM_RIGHTS, unix(7)).

    Raises:
        OSError: the other end is gone, or the limit of the socket is up.
    """
    if fds:
        socket.send_fds(connection, parts, fds)
    else:
        connection.sendmsg(parts)


def peer(connection: socket.socket) -> tuple[int, int]:
    """Return which process is at the other end, and whose it is (SO_PEERCRED)."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return int(pid), int(uid)


def receive(
    connection: socket.socket, bytes_: int, fds: int, deadline: Deadline, *, memory: bool = False
) -> tuple[bytes, Given]:
    """Receive one packet.

    Where none was asked for, a packet that brings descriptors is not taken. Where some were, more than that are closed.

    Args:
        connection: a socket of packets; its limit is what is left of the deadline, then.
        bytes_: how large the packet may be.
        fds: how many descriptors may come with it.
        deadline: until when.
        memory: whether descriptors are to be of memory (:func:`is_memory`).

    Raises:
        EOFError: the other end has gone.
        Wrong: the packet is larger, or more descriptors came, or others.
        OSError: the time is up, or no more descriptors may be open here.
    """
    connection.settimeout(deadline.left())
    if not fds:
        # What the kernel has no room for it lets go of at once, in this thread: a socket may linger for hours then
        # (SO_LINGER). So it is looked at before, and stays where it is.
        _, _, flags, _ = connection.recvmsg(1, 0, socket.MSG_PEEK)
        if flags & socket.MSG_CTRUNC:
            raise Wrong("descriptors came that nobody asked for")
        connection.settimeout(deadline.left())
    room = socket.CMSG_LEN(4 * _MOST_RIGHTS) if fds else 0
    data, rights, flags, _ = connection.recvmsg(bytes_, room, socket.MSG_CMSG_CLOEXEC)
    given = Given()
    for level, kind, value in rights:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            given.add(Given(array.array("i", value[: len(value) // 4 * 4])))
    uid = peer(connection)[1] if given else -1
    try:
        if memory:
            _refuse_strange(given, uid)
        if flags & socket.MSG_CTRUNC and len(given) < fds:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        if flags & socket.MSG_CTRUNC or len(given) > fds:
            raise Wrong("descriptors came that nobody asked for")
        if flags & socket.MSG_TRUNC:
            raise Wrong("a packet that is too large")
        if not data:
            raise EOFError
    except BaseException:
        if _is_ours(uid):
            given.close()
        for fd in given.take():
            let_go(fd, uid)
        raise
    return data, given


def hang_up(connection: socket.socket) -> None:
    """End a connection. What a user has sent and nobody has read goes with it and may linger: nobody waits for that."""
    if connection.fileno() < 0 or _is_ours(peer(connection)[1]):
        connection.close()
        return
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    _aside(connection.detach())


def _is_ours(uid: int) -> bool:
    """Whether that is us or root: who is at the other end. -1: nobody is there."""
    return uid in (-1, 0, os.geteuid())


def text(raw: bytes, most: int = _SPACES) -> str:
    """Return what was said as text that can be printed, cut where it is too long."""
    found = raw[:most].decode("utf-8", "backslashreplace")
    if found.isprintable():
        return found
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in found)


def is_memory(fd: int) -> bool:
    """Return whether a descriptor can be of memory: a device's, or of a file in memory.

    Not a pipe, a socket or a file: whoever reads, asks or closes one may have to wait for ever. The file system is
    not asked: it may be the other user's own, of which the kernel tells nobody else a mode (EACCES).
    """
    try:
        fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        try:
            return stat.S_IFMT(_mode(fd)) in (stat.S_IFCHR, 0)  # 0: what the kernel has no type for (a dma-buf, say)
        except OSError:
            return False
    return True


def device(fd: int) -> int:
    """Return the number of the file system that a file is on; nobody is asked, and the kernel says it to everybody.

    Raises:
        OSError: it is no descriptor.
    """
    return os.makedev(*struct.unpack_from("=II", _statx(fd, 0), _DEVICE_AT))


def inode(fd: int) -> tuple[int, int]:
    """Return a file's device and inode number as the kernel knows them: as of ``fstat``, but nobody is asked.

    Raises:
        OSError: the kernel does not say.
    """
    return _file(_statx(fd, _STATX_TYPE))


def inode_at(path: str) -> tuple[int, int]:
    """Return the same for what a path leads to; of the file systems on the way each is asked.

    Raises:
        OSError: nothing is there, or the kernel does not say.
    """
    return _file(_statx(-1, _STATX_TYPE, path))


def _file(found: ctypes.Array[ctypes.c_char]) -> tuple[int, int]:
    return os.makedev(*struct.unpack_from("=II", found, _DEVICE_AT)), int(struct.unpack_from("=Q", found, _INODE_AT)[0])


def let_go(fd: int, uid: int) -> None:
    """Close what is a user's without waiting for it: he may never let it be."""
    _break_off(fd, uid)  # now: whoever ends with it open waits as well
    _aside(fd)


def _aside(fd: int) -> None:
    """Close it in a thread, whose end nobody waits for; it stays open where there may be no thread more."""
    with contextlib.suppress(RuntimeError):
        threading.Thread(target=_close, args=(fd,), daemon=True).start()


def _mode(fd: int) -> int:
    """A file's type and mode as the kernel knows them."""
    return int(struct.unpack_from("=H", _statx(fd, _STATX_TYPE), _MODE_AT)[0])


def _statx(fd: int, mask: int, path: str = "") -> ctypes.Array[ctypes.c_char]:
    """What the kernel itself knows of a file (statx(2)); ``fstat`` would ask a file system that is a user's."""
    found = ctypes.create_string_buffer(256)
    if _libc.statx(fd, os.fsencode(path), _AT_EMPTY_PATH | _AT_STATX_DONT_SYNC, mask, found):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return found


def _break_off(fd: int, uid: int) -> None:
    """Break a file system off that a user serves himself (FUSE), as he could do, where the descriptor is of one.

    It may have whoever closes it wait for ever, SIGKILL or not. It goes where it is his and the machine has
    ``/sys/fs/fuse/connections``.
    """
    with contextlib.suppress(OSError):
        number = device(fd)
        place = os.path.join(FUSE, str(os.minor(number)))
        if os.geteuid() == 0 and not os.major(number) and os.stat(place).st_uid == uid:
            with open(os.path.join(place, "abort"), "w", encoding="ascii") as file:
                file.write("1")


def _close(fd: int) -> None:
    with contextlib.suppress(OSError):
        os.close(fd)


def _refuse_strange(given: Given, uid: int) -> None:
    """Raise where one is of something else; nobody waits until that is closed: who has given it may never let it be."""
    fds = given.take()
    strange = [fd for fd in fds if not is_memory(fd)]
    given.add(Given(set(fds) - set(strange) if strange else fds))
    for fd in strange:
        let_go(fd, uid)
    if strange:
        raise Wrong("a descriptor of what is no memory")
