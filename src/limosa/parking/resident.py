"""The residents, vault and mover, from Limosa's side: found by a socket, started if there is none.

Each user whose jobs are parked has one of each, in his runtime folder and with his rights. When root works on a user's
job, it uses that user's, and starts them for him. The caller's mover writes and reads images, because it works in the
caller's folder. The first operation that needs them starts them, in a session of their own, as nobody's children, and
in the cgroup of that operation.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import signal
import socket
import stat
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, ClassVar, NamedTuple, TypeVar

import msgspec

from limosa.errors import FailedUndone, LimosaError
from limosa.ipc.messages import VERSION, Count, Message, Seconds, Word, Words, receive_all, send
from limosa.ipc.packet import Wrong, hang_up, peer
from limosa.ipc.side_by_side import SECONDS, within
from limosa.parking.vault_protocol import MOST_KEYS, Keys, Number, Ping, Put, Request
from limosa.process.belief import owners_of
from limosa.process.candidates import is_own
from limosa.process.identity import Handle, Identity
from limosa.process.openat import closing, open_in
from limosa.process.places import folders, own_folder, users_place
from limosa.start import environment, popen, python

START_SECONDS = 15.0
ANSWER_SECONDS = float(os.environ.get("LIMOSA_ANSWER_SECONDS", "5"))
"""A resident that has not answered a greeting for so long hangs."""
_WHAT = {
    "vault": "the vault, which holds a job's memory while it is moved,",
    "mover": "the mover, which copies device memory,",
}
_T = TypeVar("_T")
_S = TypeVar("_S", bound="Resident")
_MOST_HOLDERS, _MOST_NAMES = 64, 1_000


class Greeting(msgspec.Struct):
    """What a resident says of itself."""

    version: int = 0  # of what it understands (``messages.VERSION``)
    sessions: Count = 0  # how many others a mover serves
    gpus: Words = []  # UUIDs of those on which a mover has contexts
    ends_in: Seconds | None = None  # seconds until a mover ends by itself; None while it is in use
    retiring: bool = False  # it is about to end, and another is to be started


class Holding(msgspec.Struct):
    """What a resident holds: how many descriptors by key."""

    keys: Annotated[dict[Word, Count], msgspec.Meta(max_length=MOST_KEYS)]


class Found(NamedTuple):
    """A resident that answers: the connection to it, who it is, and what it said of itself."""

    connection: socket.socket
    identity: Identity
    said: Greeting


def understood(message: Message, type_: type[_T], who: str) -> _T:
    """Return what a resident said as what it should be: it is its user's, and may say anything.

    Raises FailedUndone: it is something else.
    """
    try:
        return message.read_as(type_)
    except Wrong as error:
        raise FailedUndone(f"{who} says something that cannot be understood ({error})") from error


def socket_name(kind: str) -> str:
    """Return what the socket is called at which a user's vault or mover listens.

    There is one mover per user and per view of /dev, because each view exposes different GPUs. There is one vault and
    one mover per pid namespace. One in another namespace (a container that shares the folder) could not tell for which
    process it holds something, and whether that process has ended.
    """
    name = f"socket-{os.stat('/proc/self/ns/pid').st_ino}"
    return name if kind == "vault" else f"{name}-{os.stat('/dev').st_dev}"


def socket_path(kind: str, uid: int) -> Path:
    """Return where a user's vault or mover listens: his folder may have another name, if somebody took that one."""
    folder = own_folder(kind) if uid == os.geteuid() else users_place() / f"limosa-{uid}" / kind
    return folder / socket_name(kind)


def _connect(connection: socket.socket, kind: str, uid: int, name: str) -> None:
    """Connect to a socket in a user's folder, by descriptor: he may exchange what is there for something else.

    Raises OSError: there is none, or nobody listens.
    """
    with folders(kind, uid, whole=True) as found:
        for folder in found:
            with contextlib.suppress(FileNotFoundError), closing(open_in(folder.fd, name, os.O_PATH)) as fd:
                seen = os.fstat(fd)
                if stat.S_ISSOCK(seen.st_mode) and seen.st_uid == uid:
                    connection.connect(f"/proc/self/fd/{fd}")
                    return
    raise FileNotFoundError(name)


def connect(kind: str, uid: int) -> Found:
    """Return a connection to a user's resident, which is started where there is none.

    A mover that does not answer is ended and replaced: nothing is lost with it. A vault never is. One of another
    version makes way for one of ours, if it holds nothing. Raises FailedUndone: it does not answer, or cannot be
    started.
    """
    path, end = socket_path(kind, uid), time.monotonic() + START_SECONDS
    started: subprocess.Popen[bytes] | None = None
    while True:
        found = look_for(kind, uid)
        if found is not None:
            if found.said.version == VERSION:
                return found
            _make_way(kind, uid, found)
        elif started is None:
            try:
                started = start(kind, uid)
            except OSError as error:
                raise FailedUndone(f"{_WHAT[kind]} cannot be started for uid {uid} ({error})") from error
        elif started.poll() not in (None, 0):
            raise FailedUndone(f"{_WHAT[kind]} cannot be started for uid {uid} (it ended with {started.returncode})")
        if time.monotonic() > end:
            raise FailedUndone(f"{_WHAT[kind]} does not start ({path})")
        time.sleep(0.01)


def _make_way(kind: str, uid: int, found: Found) -> None:
    """Ends a resident of another version that holds nothing.

    Raises FailedUndone: it holds something, which only a Limosa of its version may move.
    """
    with found.connection as connection:
        try:
            send(connection, Keys())
            message = receive_all(connection, ANSWER_SECONDS, fds=0, memory=True)
            if understood(message, Holding, _WHAT[kind]).keys:
                text = f"{_WHAT[kind]} is of another version of Limosa (process {found.identity.pid}) and holds memory"
                raise FailedUndone(f"{text} of jobs: that version is to resume or end them first")
            if kind == "mover":
                send(connection, {"verb": "end"})
                receive_all(connection, ANSWER_SECONDS, fds=0, memory=True)
        except (OSError, EOFError, ValueError):
            return  # it has ended by itself
    if kind == "vault":  # it holds nothing when it ends: what it is given meanwhile keeps it
        _signal(found.identity, uid, signal.SIGTERM)


def look_for(kind: str, uid: int, name: str = "", *, replaces: bool = True) -> Found | None:
    """Return a connection to a user's resident, or None where there is none that answers.

    With the name of a socket, one that is retiring counts as well; ``replaces``: a mover that hangs is ended. Raises
    FailedUndone: it does not answer, or not as it should.
    """
    try:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    except OSError as error:  # no descriptor is left
        raise FailedUndone(f"{_WHAT[kind]} cannot be asked ({error})") from error
    connection.settimeout(ANSWER_SECONDS)
    identity: Identity | None = None
    try:
        _connect(connection, kind, uid, name or socket_name(kind))
        pid, owner = peer(connection)
        if owner != uid:
            raise FailedUndone(f"who listens in the folder of uid {uid} is not that user's {kind}")
        identity = Identity.of(pid)
        send(connection, Ping())
        message = receive_all(connection, ANSWER_SECONDS, fds=0, memory=True)
        said = understood(message, Greeting, _WHAT[kind])
        if name or not said.retiring:
            connection.settimeout(ANSWER_SECONDS)
            return Found(connection, identity, said)
    except (FileNotFoundError, NotADirectoryError, ConnectionError, EOFError):
        pass
    except (TimeoutError, BlockingIOError):  # the latter: so many wait that connecting would
        if kind == "vault" or not replaces:
            hang_up(connection)
            raise FailedUndone(f"{_WHAT[kind]} does not answer (process {identity.pid if identity else '?'})") from None
        replace(kind, uid, identity)
    except (OSError, ValueError) as error:
        hang_up(connection)
        raise FailedUndone(f"{_WHAT[kind]} cannot be asked ({error})") from error
    except BaseException as error:
        hang_up(connection)
        if isinstance(error, LimosaError) and not isinstance(error, FailedUndone):
            return None  # it ended meanwhile
        raise
    hang_up(connection)
    return None


def replace(kind: str, uid: int, identity: Identity | None) -> None:
    """End a mover that hangs, by pid and start time, and let its name be another's."""
    if identity is not None:
        _signal(identity, uid, signal.SIGKILL)
    with contextlib.suppress(OSError):
        _unlink(kind, uid)


def _signal(identity: Identity, uid: int, number: signal.Signals) -> None:
    """Signals a user's resident and waits a moment for its end.

    The socket's pid is that of the process that made it listen, and may be another process's by now. So it is checked
    once more, while a pidfd holds it.
    """
    with contextlib.suppress(LimosaError, OSError), Handle(identity) as handle:
        if owners_of(identity.pid) == {uid} and is_own(identity.pid):
            handle.signal(number)
            handle.wait(1.0)


def _unlink(kind: str, uid: int) -> None:
    """Removes a socket in a folder that its user may change meanwhile, by the folder's descriptor.

    Raises OSError: it could not be removed, or is something else.
    """
    name = socket_name(kind)
    with folders(kind, uid) as found:
        for folder in found:
            with closing(open_in(folder.fd, name, os.O_PATH)) as fd:
                if stat.S_ISSOCK(os.fstat(fd).st_mode):
                    os.unlink(name, dir_fd=folder.fd)


def start(kind: str, uid: int) -> subprocess.Popen[bytes]:
    """Start a user's vault or mover. Two at once are no harm: only one can have the name.

    Raises OSError: it cannot be started.
    """
    mine = uid == os.geteuid()
    process = popen(
        python("limosa.parking.resident_main", kind, str(uid)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment(for_user=not mine),
        start_new_session=True,
    )
    threading.Thread(target=process.wait, name="limosa-resident-starts", daemon=True).start()  # it leaves no zombie
    return process


def residents(kind: str) -> list[Found]:
    """Return connections to those that live and that the caller may talk to: his own; for root, everybody's.

    Others' that do not answer at once are left out.
    """
    caller = os.geteuid()
    with folders(kind) as everybodys:
        others = sorted({folder.uid for folder in everybodys} - {caller}) if caller == 0 else []
    theirs = within(SECONDS, [functools.partial(all_of, kind, uid, retiring=False) for uid in others])
    return [one for found, _ in (all_of(kind, caller, retiring=False), *theirs) for one in found]


def all_of(kind: str, uid: int, *, retiring: bool = True) -> tuple[list[Found], LimosaError | None]:
    """Return connections to all residents of a user that may hold something; ends none: it may hold a last copy.

    Without ``retiring`` the one that has the name is left out where it is about to end. Returns those that answer, and
    an error where one is there and does not: nobody knows what that one holds.
    """
    found: list[Found] = []
    silent: LimosaError | None = None
    names = [socket_name(kind) if retiring else ""]
    try:
        names += _holders(kind, uid)
    except (LimosaError, OSError) as error:
        silent = FailedUndone(f"{_WHAT[kind]} cannot be asked ({error})")
    for name in names:
        try:
            if (one := look_for(kind, uid, name, replaces=False)) is not None:
                found.append(one)
        except LimosaError as error:
            silent = error
        except OSError as error:
            silent = FailedUndone(f"{_WHAT[kind]} cannot be asked ({error})")
    return found, silent


def holder_path(path: Path | str) -> str:
    """Return where a mover listens that has given its name away, or is about to end, and still holds something."""
    return f"{path}.{os.getpid()}.holds"


def _holders(kind: str, uid: int) -> list[str]:
    """Movers that have given their name away, and those of other views of /dev: each may hold something."""
    if kind != "mover":
        return []
    own, found = socket_name(kind), set()
    with folders(kind, uid, whole=True) as there:
        for folder in there:
            with os.scandir(folder.fd) as entries:
                names = (entry.name for entry in itertools.islice(entries, _MOST_NAMES))
                found |= {name for name in names if name.startswith(f"{own.rpartition('-')[0]}-")}
    living = sorted(found - {own}, key=lambda name: (not name.startswith(own), name))
    return list(itertools.islice((name for name in living if _may_live(kind, uid, name)), _MOST_HOLDERS))


def _may_live(kind: str, uid: int, name: str) -> bool:
    """Whether somebody listens there; a socket that was left behind, by whoever was killed, refuses at once."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    connection.setblocking(False)
    try:
        _connect(connection, kind, uid, name)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        hang_up(connection)
    return True


class Resident:
    """A connection to a user's vault or mover: one that was ``found``, else it is started where it is not there.

    Its answers are its user's word: whatever they are, the worst result is a :class:`LimosaError`. The user is the
    caller, or, for root, anybody. Raises FailedUndone: it is not there and cannot be started.
    """

    kind: ClassVar[str]

    def __init__(self, uid: int | None = None, *, found: Found | None = None):
        self.uid = os.geteuid() if uid is None else uid
        self._connection, self.identity, self.said = found or connect(self.kind, self.uid)

    @classmethod
    def all(cls: type[_S]) -> list[_S]:
        """Return connections to those that live: the caller's own; for root, everybody's."""
        return [cls(peer(found.connection)[1], found=found) for found in residents(cls.kind)]

    @classmethod
    def all_of(cls: type[_S], uid: int) -> tuple[list[_S], LimosaError | None]:
        """Return connections to all of a user that may hold something, also those that are about to end.

        Returns those that answer, and an error where one does not.
        """
        found, silent = all_of(cls.kind, uid)
        return [cls(uid, found=one) for one in found], silent

    def put(self, key: str, fds: Sequence[int], note: bytes = b"") -> None:
        """Have descriptors held under a key, also when we have ended, instead of what it held; ours stay ours.

        Raises FailedUndone: it does not hold all of them.
        """
        n = self._tell(Put(key=key, note=note, n=len(fds)), Number, fds=fds).n
        if n != len(fds):
            raise FailedUndone(f"the {self.kind} holds {n} of {len(fds)} descriptors of {key}")

    def held(self) -> dict[str, int]:
        """Return how many descriptors are held, by key."""
        return self._tell(Keys(), Holding).keys

    def _tell(self, message: Request, type_: type[_T], *, fds: Sequence[int] = ()) -> _T:
        raise NotImplementedError

    def close(self) -> None:
        """End the connection; what is held under keys stays held."""
        hang_up(self._connection)

    def __enter__(self: _S) -> _S:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
