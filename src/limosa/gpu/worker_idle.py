"""A worker that waits for the next controller: ``cuInit``, half a second and more, is done in it already.

A worker whose controller has gone, and which owes nothing, listens at a socket in a folder of its user's. The next
controller that stands where it stands (:func:`standing`) takes it over; the name goes then, so that a worker never has
two controllers. One that is needed meanwhile starts as always. It ends when nobody has come for ``LIMOSA_DRIVER_IDLE``
seconds, or by ``limosa arena --end``.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from limosa import start
from limosa.gpu import worker_process
from limosa.gpu.worker_process import Apart, Launched
from limosa.ipc.frames import Frames, Reply, Request, frame
from limosa.ipc.packet import close_all, peer

_USUAL_SECONDS, _MOST_SECONDS = 120.0, 1e6


def _idle_seconds() -> float:
    """What ``LIMOSA_DRIVER_IDLE`` says; as usual where that is no number."""
    try:
        said = float(os.environ.get("LIMOSA_DRIVER_IDLE", ""))
    except ValueError:
        return _USUAL_SECONDS
    return min(said, _MOST_SECONDS) if said >= 0 else _USUAL_SECONDS


IDLE_SECONDS = _idle_seconds()
ANSWER_SECONDS = 1.0
"""That either side may take for its greeting: it has nothing else to do."""
TAKE, END = "take", "end"
_MOST_BYTES, _MOST_NAMES, _MOST_GREETING = 1 << 20, 1_000, 100
_WORD = "limosa-"
_LOCK, _MADE = ".lock", "~"
_END_ALL_SECONDS = 5.0
_RIGHTS = ("Umask:", "Uid:", "Gid:", "Groups:", "Cap", "NoNewPrivs:", "Seccomp")
_NAMESPACES = ("user", "pid", "mnt", "net", "ipc", "cgroup", "time")
_LOADED_BY = ("LD_LIBRARY_PATH",)
_LOADED_BY_BEGINNINGS = ("CUDA_", "LIMOSA_")


def standing(pid: int | str = "self") -> str:
    """Return with which rights, in which namespaces and in which cgroup a process runs.

    Who has the same could make the same calls, would end with the same cgroup, and leaves a will that can do as much.

    Raises:
        OSError: it has ended, or may not be looked at.
    """
    with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
        said = [line.strip() for line in file if line.startswith(_RIGHTS)]
    for name in _NAMESPACES:
        with contextlib.suppress(FileNotFoundError):  # of an older kernel
            said.append(os.readlink(f"/proc/{pid}/ns/{name}"))
    root = os.stat(f"/proc/{pid}/root")
    said.append(f"{root.st_dev} {root.st_ino}")
    said += [_text(f"/proc/{pid}/{name}") for name in ("cgroup", "attr/current", "oom_score_adj")]
    for line in _text(f"/proc/{pid}/limits").splitlines():
        words = line.split()  # of open files the soft limit is raised and lowered all the time
        said.append(" ".join(words[:3] + words[4:]) if line.startswith("Max open files") else line)
    return "\n".join(said)


def _text(path: str) -> str:
    """What a file of /proc says; "" where there is none, or (of a security module) nothing in it."""
    try:
        with open(path, "rb") as file:
            return file.read(1 << 16).decode(errors="replace")
    except PermissionError:
        raise
    except OSError:
        return ""


def name() -> str:
    """Return what the socket is called at which a worker waits that would do for this process.

    Raises:
        OSError: /proc cannot be read.
    """
    made = start.environment()
    loaded = {k: v for k, v in made.items() if k in _LOADED_BY or k.startswith(_LOADED_BY_BEGINNINGS)}
    view = os.stat("/dev")
    facts = [standing(), str(view.st_dev), *(f"{k}={v}" for k, v in sorted(loaded.items())), *_code()]
    return hashlib.blake2b("\0".join(facts).encode(errors="surrogateescape"), digest_size=12).hexdigest()


def _code() -> Iterator[str]:
    """What code a worker runs: one of a Limosa that was exchanged since is not taken over."""
    here = Path(__file__).parent
    for folder in (here, here.parent / "ipc"):
        for entry in sorted(os.scandir(folder), key=lambda e: e.name):
            if entry.name.endswith(".py"):
                yield f"{entry.path} {entry.stat().st_mtime_ns}"


# --- the controller's side -------------------------------------------------------------------------------------------


def start_in(folder: Callable[[], Path | None]) -> Callable[[], Launched]:
    """Return what gives a :class:`~limosa.gpu.Driver` its workers: one that waits, else a new one that will.

    Args:
        folder: returns where workers of this user wait, which nobody else can write to; None for nowhere.
    """

    def started() -> Launched:
        place = folder() if IDLE_SECONDS > 0 else None
        if place is None:
            return worker_process.launch()
        path = ""
        with contextlib.suppress(OSError):
            path = str(place / name())
            if (found := _taken(path)) is not None:
                return found
        return worker_process.launch(path)

    return started


def _taken(path: str) -> Launched | None:
    """Take over the worker that waits at a path; None where none does, or it does not answer at once."""
    connection, pid = _asked(path, TAKE, [_environment()])
    return None if connection is None else Launched(connection, Apart(pid), -1)


def _environment() -> dict[str, str]:
    """What the worker's will is to have, if it is left one."""
    return {k: v for k, v in start.environment().items() if not _is_odd(k) and not _is_odd(v)}


def _is_odd(text: str) -> bool:
    return any("\ud800" <= c <= "\udfff" for c in text)  # no UTF-8: cannot be told


def end_all(folder: Path) -> list[int]:
    """Have all workers end that wait in the caller's own folder.

    Returns:
        Their pids.
    """
    ended, until = [], time.monotonic() + _END_ALL_SECONDS
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in itertools.islice(entries, _MOST_NAMES):
            if time.monotonic() > until:
                break
            path, kind = os.path.splitext(entry.path)
            if kind == _LOCK and not os.path.lexists(path):
                _tidy(path)  # of one that was killed before it had its name
            if kind == _LOCK or entry.name.endswith(_MADE):
                continue
            connection, pid = _asked(entry.path, END, [])
            if connection is None:
                ended += _told(entry.path)
                _tidy(entry.path)
            else:
                connection.close()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    Apart(pid).wait(ANSWER_SECONDS)
                ended.append(pid)
    return ended


def _told(path: str) -> list[int]:
    """Send SIGTERM to a worker of ours that waits at a path with other rights, or elsewhere; returns its pid."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as one:
        one.settimeout(ANSWER_SECONDS)
        one.connect(path)
        pid, owner = peer(one)
        handle = os.pidfd_open(pid)
        try:
            if owner == os.geteuid() and _text(f"/proc/{pid}/comm") == "limosa-worker\n":
                signal.pidfd_send_signal(handle, signal.SIGTERM)
                return [pid]
        finally:
            os.close(handle)
    return []


def _tidy(path: str) -> None:
    """Remove what one that was killed has left at a path; where one waits, it has the lock."""
    with contextlib.suppress(OSError):
        guard = os.open(f"{path}{_LOCK}", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(guard), os.lstat(f"{path}{_LOCK}")):
                return  # another one's by now
            for one in (path, f"{path}{_MADE}", f"{path}{_LOCK}"):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(one)
        finally:
            os.close(guard)


def _asked(path: str, what: str, args: list[Any]) -> tuple[socket.socket | None, int]:
    """Say something to the worker that waits at a path.

    Returns:
        The connection and its pid; None where none answers as it should.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    until = time.monotonic() + ANSWER_SECONDS
    try:
        connection.settimeout(ANSWER_SECONDS)
        connection.connect(path)
        pid, owner = peer(connection)
        if owner != os.geteuid() or standing(pid) != standing():
            raise OSError("another's")
        word = _word_at(pid, _said(connection, until))
        me = os.pidfd_open(os.getpid())
        try:
            socket.send_fds(connection, [frame(Request(0, what, [word, *args]))], [me])
        finally:
            os.close(me)
        if _said(connection, until) != pid:
            raise OSError("it calls itself another")
        connection.settimeout(None)
        return connection, pid
    except (OSError, EOFError, ValueError):
        connection.close()
        return None, 0


def _said(connection: socket.socket, until: float) -> int:
    """Return the number that a worker says; what comes behind it is for whoever reads next.

    Raises:
        OSError, EOFError, ValueError: it says something else, or not in time.
    """
    frames, said = Frames(replies=True), list[Reply]()
    for _ in range(_MOST_GREETING):
        connection.settimeout(max(0.001, until - time.monotonic()))
        data = connection.recv(1)
        if not data:
            raise EOFError
        if said := frames.feed(data):
            break
    if not said or said[0].error is not None or not isinstance(said[0].value, int) or said[0].value >= 1 << 31:
        raise ValueError("no number")
    return said[0].value


def _word_at(pid: int, fd: int) -> str:
    """Return the word that is in the name of a worker's descriptor.

    The kernel lets nobody read that name who may not trace the worker: one of the same user that is locked in
    (Landlock, say, of which /proc says nothing) may not.
    """
    return os.readlink(f"/proc/{pid}/fd/{fd}").partition(_WORD)[2].partition(" ")[0]


# --- the worker's side -----------------------------------------------------------------------------------------------


def next_controller(path: str, last: socket.socket) -> tuple[socket.socket, int] | None:
    """Wait for another controller.

    Args:
        path: where.
        last: the connection to the last one, which is closed as soon as the next could come.

    Returns:
        The connection to it and its pidfd; None where nobody has come, or another worker waits there.
    """
    try:
        guard = os.open(f"{path}{_LOCK}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:
        return None
    try:
        fcntl.flock(guard, fcntl.LOCK_EX | fcntl.LOCK_NB)  # whoever has it is the one that waits
        if not os.path.samestat(os.fstat(guard), os.lstat(f"{path}{_LOCK}")):
            raise FileNotFoundError  # the one before has removed it meanwhile
    except OSError:
        os.close(guard)
        return None
    made = f"{path}{_MADE}"
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(made)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as listening:
            try:
                listening.bind(made)
                os.chmod(made, 0o600)
                listening.listen(8)
                os.rename(made, path)  # whoever sees the name can connect
                _leave(last)
                return _first(listening, time.monotonic() + IDLE_SECONDS)
            finally:
                for one in (made, path):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(one)
    except OSError:
        return None
    finally:
        with contextlib.suppress(OSError):
            os.unlink(f"{path}{_LOCK}")
        os.close(guard)


def _leave(last: socket.socket) -> None:
    with contextlib.suppress(OSError):
        last.sendall(frame(Reply(0, "waits")))
    last.close()


def _first(listening: socket.socket, until: float) -> tuple[socket.socket, int] | None:
    """The first that comes and stands where we stand; None where it has us end, or the time is up."""
    while (left := until - time.monotonic()) > 0:
        listening.settimeout(left)
        try:
            connection, _ = listening.accept()
        except TimeoutError:
            return None
        request, handle = _greeted(connection)
        if (
            request is not None
            and request.call == TAKE
            and len(request.args) == 2
            and isinstance(request.args[1], dict)
        ):
            with contextlib.suppress(ValueError):  # what no environment can have
                _dress(request.args[1])
                return connection, handle
        if handle >= 0:
            os.close(handle)
        if request is not None and request.call == END:
            _tell(connection, Reply(0, os.getpid()))
            return None
        connection.close()
    return None


def _greeted(connection: socket.socket) -> tuple[Request | None, int]:
    """What one that has connected asks for, and its pidfd; None where it is not one that may."""
    fds: list[int] = []
    word = secrets.token_hex(16)
    proof = os.memfd_create(f"{_WORD}{word}", os.MFD_CLOEXEC)
    try:
        until = time.monotonic() + ANSWER_SECONDS
        pid, owner = peer(connection)
        if owner != os.geteuid() or standing(pid) != standing():
            raise PermissionError
        connection.settimeout(ANSWER_SECONDS)
        connection.sendall(frame(Reply(0, proof)))
        frames, size = Frames(replies=False), 0
        asked: list[Request] = []
        while not asked:
            connection.settimeout(max(0.001, until - time.monotonic()))
            data, more, _, _ = socket.recv_fds(connection, 1 << 16, 1, socket.MSG_CMSG_CLOEXEC)
            fds += more
            size += len(data)
            if not data or size > _MOST_BYTES or len(fds) > 1:
                raise EOFError
            asked = frames.feed(data)
        # By the pidfd it is that very process, and no other that has its number meanwhile.
        if asked[0].args[:1] == [word] and fds and _pid_of(fds[0]) == pid and standing(pid) == standing():
            connection.settimeout(None)
            return asked[0], fds.pop()
    except (OSError, EOFError, ValueError):
        pass
    finally:
        os.close(proof)
    close_all(fds)
    return None, -1


def _pid_of(handle: int) -> int:
    with open(f"/proc/self/fdinfo/{handle}", encoding="ascii") as file:
        return next((int(line[4:]) for line in file if line.startswith("Pid:")), -1)


def _dress(environment: Mapping[Any, Any]) -> None:
    """Take the environment of the controller: its will is to have it."""
    os.environ.clear()
    os.environ.update({str(k): str(v) for k, v in environment.items()})


def _tell(connection: socket.socket, reply: Reply) -> None:
    with contextlib.suppress(OSError), connection:
        connection.sendall(frame(reply))
