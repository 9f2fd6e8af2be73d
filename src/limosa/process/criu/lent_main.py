"""CRIU for a container runtime, whose request to restore a container lacks something.

runc (as of 1.1) puts CRIU itself into the new container's cgroup, and names that to CRIU for version 1 only. CRIU then
puts the processes into the cgroup that they had: that of the container which was dumped, with its limits and its device
filter, and beside its processes if it still runs. So between the two stands a relay that looks at the one request by
which a restore begins, and adds the cgroup to it (``criu_opts.cg_root`` in CRIU's ``rpc.proto``). All else goes through
as it is.

A network namespace of the container's own comes back empty: runc has CRIU leave it out, and its loopback interface,
which runc sees to when it makes a container, stays down. So the relay brings it up as soon as CRIU says that the
namespaces are there, before any process runs in them.

What a container has bound in is opened by CRIU without following a link at its end, and runtimes name it as their
configuration does: Debian's ``/usr/libexec/podman/catatonit`` (``podman run --init``) is one. Here it is named by where
that leads. A link of another user's on the way, who may have put it there since, is no way at all: there will be no
CRIU. CRIU goes that way once more, and somebody may be quick: so what was found is held open, and when CRIU says that
all is mounted, that, and nothing else, must be there. (CRIU cannot be given the descriptor: what it mounts must be of
its own mount namespace.)

CRIU opens what a container's processes had open by the names that it had, while it has folders of the machine open
itself. A link in the container's file system that was put there since would lead there (``/proc/self/fd/…``). So CRIU
runs with the guard of Limosa's plugin (``native/criu/guard.c``), as for any job.

The shim of containerd cannot be told that connections, sockets to others or locks of files are to come back
(``--tcp-established``, ``--ext-unix-sk``, ``--file-locks``). What CRIU is started with here says it, and the request
says otherwise; so it is changed, too.

The program that the runtime has started becomes CRIU: it is CRIU's pid that it puts into the cgroup, and whose children
it expects. The relay is nobody's child. CRIU opens folders by the descriptors of whoever made its socket, which is not
the runtime then: they are opened here, and the request names these.

A program of its own, which imports nothing of Limosa: a runtime starts CRIU three times for a restore.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import fcntl
import functools
import os
import signal
import socket
import stat
import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from select import POLLHUP, POLLIN, poll

PLUGIN = "limosa_plugin.so"
_MOST_BYTES = 1 << 20
_MOST_FDS = 64
_TYPE, _OPTS, _CG_ROOT = 1, 2, 25  # criu_req.type, criu_req.opts, criu_opts.cg_root
_SWITCHES = {"--tcp-established": 5, "--ext-unix-sk": 4, "--file-locks": 8}  # criu_opts.tcp_established, …
_FOLDERS = (1, 17)  # criu_opts.images_dir_fd, criu_opts.work_dir_fd
_HIGH = 200
_MOST_LINKS = 40
_RESTORE = 2  # criu_req_type
_EXT_MNT, _KEY, _VAL = 23, 1, 2  # criu_opts.ext_mnt, ext_mount_map.key (where in the container), .val
_RESOLVE_NO_SYMLINKS, _RESOLVE_IN_ROOT = 0x04, 0x10  # openat2(2)
_OPENAT2 = 437
_CONTROLLER, _PATH = 1, 2  # cgroup_root.ctrl ("": version 2), cgroup_root.path
_BYTES = 2  # the wire type of what has a length
_EMPTY_NS = 38  # criu_opts.empty_ns: namespaces that come back with nothing in them
_NOTIFY, _SCRIPT, _PID = 5, 1, 2  # criu_resp.notify, criu_notify.script, criu_notify.pid
_MADE = b"setup-namespaces"  # the network's
_MOUNTED = b"post-setup-namespaces"
_NEWNET = 0x40000000  # CLONE_NEWNET
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 1  # SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP
_IFREQ = "16sh22x"


def main(arguments: list[str]) -> None:
    """Become CRIU.

    Args:
        arguments: its program and arguments; of ``swrk FD`` the descriptor is that of the runtime's socket.
    """
    if arguments[-2:-1] == ["swrk"]:
        asked = socket.socket(fileno=int(arguments[-1]))
        data = asked.recv(_MOST_BYTES, socket.MSG_PEEK)  # by then the runtime has put us into the cgroup
        if is_restore(data):
            _preload_guard(arguments)
        binds: dict[bytes, int] = {}
        try:
            switches = [field for word, field in _SWITCHES.items() if word in arguments]
            changed = adjusted(data, _cgroup_of("self"), switches, binds)
        except PermissionError as error:
            _log(data, _peer(asked), str(error))
            sys.exit(1)
        empty = has_empty_network(data)
        if changed != data or empty or binds:
            asked.recv(_MOST_BYTES)
            told = functools.partial(_log, data, _peer(asked), how=os.O_APPEND)
            _stand_between(asked, _with_own_folders(changed, _peer(asked)), empty, binds, told)
        asked.detach()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # which Python ignores
    os.execv(arguments[0], arguments)  # noqa: S606 - an absolute path


def _preload_guard(arguments: Sequence[str]) -> None:
    """Have what we become start with the guard, by its descriptor: a path with a space or a colon would be several.

    Raises:
        OSError: it is not there.
    """
    fd = os.open(os.path.join(arguments[arguments.index("--libdir") + 1], PLUGIN), os.O_RDONLY)
    high = fcntl.fcntl(fd, fcntl.F_DUPFD, _HIGH)  # above what the runtime hands on
    os.close(fd)
    os.environ["LD_PRELOAD"] = f"/proc/self/fd/{high}"


def is_restore(request: bytes) -> bool:
    """Return whether a request to CRIU is for a restore."""
    try:
        return (_TYPE, _RESTORE) in {(n, c) for n, c, _ in _fields(request)}
    except (IndexError, ValueError):
        return False


def _log(request: bytes, runtime: int, text: str, how: int = os.O_CREAT | os.O_TRUNC) -> None:
    """Say why there is no CRIU where it would say that."""
    opts = next(
        (content for number, content, _ in _fields(request) if number == _OPTS and isinstance(content, bytes)), b""
    )
    for number, folder, _ in _fields(opts):
        if number == _FOLDERS[1] and isinstance(folder, int):
            path = f"/proc/{runtime}/fd/{folder}/restore.log"
            fd = os.open(path, os.O_WRONLY | how | os.O_NOFOLLOW, 0o600)
            with open(fd, "w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(f"(00.000000) Error (limosa): {text}\n")


def _stand_between(
    asked: socket.socket, request: bytes, empty_network: bool, binds: dict[bytes, int], log: Callable[[str], None]
) -> None:
    """Put a relay between the runtime's socket and the one that gets its number, which CRIU reads the request from."""
    own, criu_has = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    own.send(request)
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        own.close()
        os.dup2(criu_has.fileno(), asked.fileno(), inheritable=True)
        criu_has.close()
        return
    if os.fork():
        os._exit(0)
    try:
        for fd in map(int, os.listdir("/proc/self/fd")):
            if fd not in (asked.fileno(), own.fileno(), *binds.values()):
                with contextlib.suppress(OSError):
                    os.close(fd)
        os.chdir("/")
        _relay(asked, own, empty_network, binds, log)
    finally:
        os._exit(0)


def _relay(
    asked: socket.socket, criu: socket.socket, empty_network: bool, binds: dict[bytes, int], log: Callable[[str], None]
) -> None:
    ends = {asked.fileno(): (asked, criu), criu.fileno(): (criu, asked)}
    poller = poll()
    for fd in ends:
        poller.register(fd, POLLIN | POLLHUP)
    while True:
        for fd, _ in poller.poll():
            source, target = ends[fd]
            data, ancillary, _, _ = source.recvmsg(_MOST_BYTES, socket.CMSG_SPACE(_MOST_FDS * 4))
            if not data and not ancillary:
                return
            script, pid = notified(data) if source is criu else (b"", 0)
            if script == _MOUNTED and (wrong := exchanged(f"/proc/{pid}/root", binds)):
                log(wrong)
                return  # CRIU gets no answer, and takes away what it has made
            if script == _MADE and empty_network:
                with contextlib.suppress(OSError):  # then it is as the runtime would have had it
                    _bring_up_loopback(pid)
            fds = array.array("i")
            for level, kind, content in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
            target.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)] if fds else [])
            for handed in fds:
                os.close(handed)


def has_empty_network(request: bytes) -> bool:
    """Return whether a request to CRIU is for a restore whose network namespace comes back empty."""
    try:
        opts = [content for number, content, _ in _fields(request) if number == _OPTS and isinstance(content, bytes)]
        asked = [c for one in opts for number, c, _ in _fields(one) if number == _EMPTY_NS and isinstance(c, int)]
    except (IndexError, ValueError):
        return False
    return is_restore(request) and any(kinds & _NEWNET for kinds in asked)


def notified(answer: bytes) -> tuple[bytes, int]:
    """Return how far CRIU says that it is, and the container's first process; (b"", 0) where it says something else."""
    try:
        for number, content, _ in _fields(answer):
            if number == _NOTIFY and isinstance(content, bytes):
                told = {n: c for n, c, _ in _fields(content)}
                script, pid = told.get(_SCRIPT), told.get(_PID)
                if isinstance(script, bytes) and isinstance(pid, int) and 0 < pid < 1 << 31:
                    return script, pid
    except (IndexError, ValueError):
        pass
    return b"", 0


def exchanged(root: str, binds: Mapping[bytes, int]) -> str:
    """Return what is mounted in a container, and is not what was to be, in words; "" where all is.

    Args:
        root: its root folder.
        binds: where in it → a descriptor of what is to be there.
    """
    at = os.open(root, os.O_PATH | os.O_DIRECTORY)
    try:
        for place, fd in binds.items():
            try:
                found = _openat2(at, place)
            except OSError as error:
                return f"{os.fsdecode(place)} is bound in, and cannot be looked at: {error.strerror}"
            same = os.path.samestat(os.fstat(found), os.fstat(fd))
            os.close(found)
            if not same:
                return f"{os.fsdecode(place)} is bound in, and something else was put in the place of what it is"
    finally:
        os.close(at)
    return ""


def _openat2(root: int, path: bytes) -> int:
    """Open a path below a folder, following no link on the way."""
    libc = ctypes.CDLL(None, use_errno=True)
    flags = os.O_PATH | os.O_CLOEXEC
    how = struct.pack("QQQ", flags, 0, _RESOLVE_NO_SYMLINKS | _RESOLVE_IN_ROOT)
    fd: int = libc.syscall(_OPENAT2, root, path, how, len(how))
    if fd < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return fd


def _bring_up_loopback(pid: int) -> None:
    """Bring up the interface ``lo`` of a process's network namespace.

    Raises:
        OSError: it cannot be.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    own, its = (os.open(f"/proc/{who}/ns/net", os.O_RDONLY | os.O_CLOEXEC) for who in ("self", pid))
    try:
        if libc.setns(its, _NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
        try:
            inside = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        finally:
            libc.setns(own, _NEWNET)
        with inside:
            name, flags = struct.unpack(_IFREQ, fcntl.ioctl(inside, _GET_FLAGS, struct.pack(_IFREQ, b"lo", 0)))
            fcntl.ioctl(inside, _SET_FLAGS, struct.pack(_IFREQ, name, flags | _UP))
    finally:
        os.close(own)
        os.close(its)


def _peer(asked: socket.socket) -> int:
    """Who made the other end: the runtime."""
    return int(struct.unpack("3i", asked.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0])


def _with_own_folders(request: bytes, runtime: int) -> bytes:
    """Open the folders that a request names by the runtime's descriptors, and name them by ours."""
    made = b""
    for number, content, whole in _fields(request):
        if number == _OPTS and isinstance(content, bytes):
            made += _field(_OPTS, b"".join(_own_folder(one, runtime) for one in _fields(content)))
        else:
            made += whole
    return made


def _own_folder(field: tuple[int, int | bytes, bytes], runtime: int) -> bytes:
    number, content, whole = field
    if number not in _FOLDERS or not isinstance(content, int) or content >= 1 << 31:
        return whole
    fd = os.open(f"/proc/{runtime}/fd/{content}", os.O_RDONLY | os.O_DIRECTORY)
    high = fcntl.fcntl(fd, fcntl.F_DUPFD, _HIGH)  # above what the runtime hands on
    os.close(fd)
    return _varint(number << 3) + _varint(high)


def _cgroup_of(pid: str) -> str:
    """A process's version 2 cgroup; "" for the root, and where there is none."""
    try:
        with open(f"/proc/{pid}/cgroup", encoding="utf-8", errors="surrogateescape") as file:
            found = [line.rstrip("\n")[3:] for line in file if line.startswith("0::")]
    except OSError:
        return ""
    return found[0] if found and found[0] != "/" else ""


def adjusted(request: bytes, cgroup: str, switches: Sequence[int] = (), binds: dict[bytes, int] | None = None) -> bytes:
    """Return a request to CRIU that names the cgroup of what is restored, and no links.

    Args:
        request: as the runtime made it; one that is no restore comes back as it is.
        cgroup: the path; "" for none. It is named where the runtime names none.
        switches: fields of ``criu_opts`` that are to be true.
        binds: gets what is bound in: where in the container → a descriptor of it.

    Raises:
        PermissionError: what is bound in is reached by a link of another user's, or is not there.
    """
    try:
        fields = list(_fields(request))
        opts = next((content for number, content, _ in fields if number == _OPTS and isinstance(content, bytes)), None)
        if opts is None or not is_restore(request):
            return request
        named = any(number == _CG_ROOT for number, _, _ in _fields(opts))
        opts = b"".join(
            _without_link(one, {} if binds is None else binds) for one in _fields(opts) if one[0] not in switches
        )
        opts += b"".join(_varint(number << 3) + _varint(1) for number in switches)
    except (IndexError, ValueError):
        return request  # CRIU will say what it is
    if cgroup and not named:
        opts += _field(_CG_ROOT, _field(_CONTROLLER, b"") + _field(_PATH, os.fsencode(cgroup)))
    return b"".join(_field(_OPTS, opts) if number == _OPTS else whole for number, _, whole in fields)


def _without_link(field: tuple[int, int | bytes, bytes], binds: dict[bytes, int]) -> bytes:
    """A field of ``criu_opts``; where it names what is bound in, by where links lead."""
    number, content, whole = field
    if number != _EXT_MNT or not isinstance(content, bytes):
        return whole
    parts = {part: value for part, value, _ in _fields(content)}
    place, path = parts.get(_KEY), parts.get(_VAL)
    if not isinstance(path, bytes) or path[:1] != b"/":
        return whole
    end, fd = _end_of(path)
    if isinstance(place, bytes) and place[:1] == b"/":
        binds[place] = fd
    return _field(_EXT_MNT, b"".join(_field(_VAL, end) if n == _VAL else kept for n, _, kept in _fields(content)))


def _end_of(path: bytes) -> tuple[bytes, int]:
    """Where a path leads, and a descriptor of what is there.

    Raises:
        PermissionError: it leads by a link that is neither root's nor ours, or nowhere.
    """
    rest, links = _names(path), 0
    at = os.open("/", os.O_PATH)
    try:
        while rest:
            name = rest.pop(0)
            fd = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=at)
            info = os.fstat(fd)
            if not stat.S_ISLNK(info.st_mode):
                os.close(at)
                at = fd
                continue
            links += 1
            if info.st_uid not in (0, os.geteuid()) or links > _MOST_LINKS:
                there = os.fsdecode(os.path.join(_path_of(at), name))
                raise PermissionError(f"{os.fsdecode(path)} is bound in, and {there} is a link of uid {info.st_uid}")
            target = os.readlink(b"", dir_fd=fd)
            os.close(fd)
            rest = _names(target) + rest
            if target[:1] == b"/":
                os.close(at)
                at = os.open("/", os.O_PATH)
        return _path_of(at), at
    except PermissionError:
        os.close(at)
        raise
    except OSError as error:  # by its name CRIU would meet what was put there meanwhile
        os.close(at)
        raise PermissionError(f"{os.fsdecode(path)} is bound in: {error.strerror}") from None


def _path_of(fd: int) -> bytes:
    return os.readlink(b"/proc/self/fd/%d" % fd)


def _names(path: bytes) -> list[bytes]:
    """The names of a path that lead on."""
    return [name for name in path.split(b"/") if name not in (b"", b".")]


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes, bytes]]:
    """A message's fields: number, value, and the bytes of all of it."""
    at = 0
    while at < len(message):
        begin = at
        key, at = _number(message, at)
        value: int | bytes
        if key & 7 == _BYTES:
            length, at = _number(message, at)
            value, at = message[at : at + length], at + length
        elif key & 7 == 0:
            value, at = _number(message, at)
        else:
            size = {1: 8, 5: 4}.get(key & 7, 0)
            if not size:
                raise ValueError("a field of an unknown kind")
            value, at = message[at : at + size], at + size
        yield key >> 3, value, message[begin:at]


def _number(message: bytes, at: int) -> tuple[int, int]:
    """A number at a place, and the place behind it."""
    found = shift = 0
    while True:
        byte = message[at]
        found |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if not byte & 0x80:
            return found, at


def _field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | _BYTES) + _varint(len(content)) + content


def _varint(number: int) -> bytes:
    made = bytearray()
    while number > 0x7F:
        made.append(number & 0x7F | 0x80)
        number >>= 7
    made.append(number)
    return bytes(made)


if __name__ == "__main__":
    main(sys.argv[1:])
