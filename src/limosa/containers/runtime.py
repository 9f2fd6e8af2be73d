"""What a container runtime is asked for, whichever it is: to write a container to disk, and to bring it back.

Names and ids are checked before they are told to a program: an id is what the runtime's own notes say, and no name
begins with a dash. What a runtime says of a container is compared with what the kernel says: which first process it
has, in which cgroup.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from limosa import start
from limosa.containers import calls
from limosa.containers.calls import Said
from limosa.containers.freezer import is_frozen, thaw
from limosa.containers.state import State, states
from limosa.errors import FailedUndone, InvalidArgument, LimosaError, NoSuchProcess, PidReused, Zombie
from limosa.image import ContainerRecord
from limosa.process.criu.log import Cause, cause
from limosa.process.criu.stats import DumpStats
from limosa.process.identity import END_SECONDS, Handle, Identity

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}", re.ASCII)
_PORT = re.compile(r"[1-9][0-9]{0,4}", re.ASCII)
MACHINES = "host"
"""What the network, and any other namespace, of a container is called that has the machine's."""

PRIVATE = "private"
"""What a network is called that is the container's own."""

JOINED = "joined"
"""What a network is called that a container was put into, with whoever else is there."""

SHARES = "container-shares"
_MOST_PORTS = 2000


class Volume(msgspec.Struct, frozen=True):
    """A named volume of a container."""

    name: str
    path: str


class Contained(msgspec.Struct, frozen=True, kw_only=True):
    """What a runtime says of one of its containers."""

    id: str
    name: str
    init: Identity | None  # its first process, if it runs
    image: str = ""  # the name of the image that it was made of
    image_id: str = ""
    bundle: str = ""
    network: str = ""  # "host", "none", "private", "joined"
    monitor: int = 0  # the pid of podman's monitor of it
    run: str = ""  # which run of it this is, or was the last, in words of its runtime's; "" where that says none
    ran: bool = True  # whether it runs, or has
    paused: bool = False  # whether its runtime was told to pause it, where that keeps it in mind besides the cgroup
    ports: tuple[int, ...] = ()  # TCP ports of all of the machine's addresses that its runtime leads to it
    published: tuple[str, ...] = ()  # other ports of the machine that it does (limosa.containers.published)
    volumes: tuple[Volume, ...] = ()
    writes: tuple[str, ...] = ()  # what of the machine it may change: "volume NAME", "folder PATH", "file PATH"
    log: str = ""  # the file that its output goes to
    hosts: str = ""  # the file that podman has written as its /etc/hosts
    namespace: str = ""  # of containerd's
    snapshotter: str = ""  # of containerd's, which keeps its root file system
    pod: str = ""  # "NAMESPACE/POD", where it is one's
    stays: str = ""  # why ending it would not end it for good
    ending: bool = False  # whether its runtime has begun to end it, and takes it for dead from then on
    removed: bool = False  # whether its runtime has begun to take it away: its files are gone, its record is not
    restored: str = ""  # when it was brought back from an image, where the runtime says that
    stats: Mapping[str, float] = {}  # what CRIU says of the restore that has made it, where that was asked for
    # what keeps the runtime from writing it to disk: id of the refusal and text of each
    against: tuple[tuple[str, str], ...] = ()

    @property
    def log_goes(self) -> bool:
        """Whether its output goes to a file that its runtime removes with it."""
        return bool(self.bundle) and self.log.startswith(f"{self.bundle}/")


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """How the host side of a container is to be written, or brought back.

    Attributes:
        criu_folder: the folder with the CRIU that the runtime is to use.
        images_fd: the image's folder ``criu/``.
        work_fd: the folder for logs, for this run alone.
        tcp_established, file_locks, ext_unix_sk: as CRIU has them.
        stats: whether CRIU's statistics are wanted.
        output: a descriptor of where the output of a container goes that has no place of its runtime's for that.
        own_name: whether it comes back under the name that it had, and so with the address that it had.
        publish: ports of the machine that are to lead to it, as podman's ``--publish`` has them; none: those that did.
        on_start: told who the runtime's program is, before it begins.
        tick: called while it works; raises to have it stopped.
    """

    criu_folder: str
    images_fd: int
    work_fd: int
    tcp_established: bool = False
    file_locks: bool = False
    ext_unix_sk: bool = False
    stats: bool = False
    output: int = subprocess.DEVNULL
    own_name: bool = False
    publish: tuple[str, ...] = ()
    on_start: Callable[[Identity], None] = calls.nobody
    tick: Callable[[], None] = lambda: None


def bound(source: str) -> list[str]:
    """Return what a container may change by a bind of something of the machine's, in words: none of devices, sockets.

    Args:
        source: what is bound, where that is not read-only.
    """
    place = os.path.realpath(source)
    kind = "folder" if os.path.isdir(place) else "file" if os.path.isfile(place) else ""
    return [f"{kind} {place}"] if kind and not f"{place}/".startswith("/dev/") else []


def is_port(text: str) -> bool:
    """Return whether a text is the number of a port."""
    return _PORT.fullmatch(text) is not None and int(text) < 1 << 16


def check_name(name: str) -> str:
    """Return a name for a container that may be told to a runtime.

    Raises:
        InvalidArgument: it may not.
    """
    if not NAME.fullmatch(name):
        raise InvalidArgument(
            detail=f"{name!r} is no name for a container: letters, digits, '_', '.' and '-', and no dash to begin with"
        )
    return name


class Runtime(ABC):
    """One runtime's program.

    Args:
        program: its absolute path.
        configured: by which variables (:func:`limosa.containers.calls.settings`).
        notes: folders in which it notes its containers, besides the usual ones.
    """

    name: ClassVar[str]
    needs: ClassVar[str] = ""  # the program that is told what to do; "": of the runtime's own name

    def __init__(self, program: str, configured: Mapping[str, str], notes: Sequence[str]):
        self.program, self.configured, self.notes = program, dict(configured), list(notes)

    @abstractmethod
    def find(self, word: str) -> Contained | None:
        """Return what it says of the container of an id or a name; None where it has none."""

    @abstractmethod
    def write(self, contained: Contained, kept: Kept) -> DumpStats:
        """Write a container to disk, and let it run on: frozen, it stays so. Return CRIU's statistics, if asked for.

        Raises:
            FailedUndone: it failed, and the container is as it was.
        """

    @abstractmethod
    def against_return(self, record: ContainerRecord, name: str, bundle: str) -> list[tuple[str, str, str]]:
        """Return what stands against bringing a container back under a name: (id, text, hint) of each."""

    def bundle_of(self, record: ContainerRecord, bundle: str) -> str:
        """Return the bundle of a container that is brought back, in the one form that all others are compared with.

        Args:
            record: what the image says of it.
            bundle: the one that was named; "" for none.
        """
        return bundle or record.bundle

    def may_write(self, record: ContainerRecord, bundle: str) -> list[str]:
        """Return what of the machine a container that is brought back may change, in words (``Contained.writes``).

        Args:
            record: what the image says of it.
            bundle: its bundle, as :meth:`bundle_of` has it.
        """
        del bundle
        return record.writes

    def alone(self, record: ContainerRecord, name: str, bundle: str) -> tuple[list[str], list[str]]:
        """Return what of a container that is brought back there is one of on the machine, in words.

        Returns:
            What it makes or takes, so that no other can at the same time; and what is there already and others may use
            as well, once it has been made.
        """
        del bundle
        ports = [f"port {port}" for port in [*record.published[:_MOST_PORTS], *record.ports[:_MOST_PORTS]]]
        return [f"container {self.name}:{name}", *ports], []

    def taken_since(self, record: ContainerRecord, name: str, bundle: str) -> list[tuple[str, str, str]]:
        """Return what stands against it by now, as :meth:`against_return`, where making it would not tell."""
        del record, name, bundle
        return []

    @abstractmethod
    def bring_back(self, record: ContainerRecord, name: str, bundle: str, kept: Kept) -> Contained:
        """Make a container of the image's files.

        Raises:
            FailedUndone: it failed; nothing of it is left, as far as the runtime clears up after itself.
        """

    @abstractmethod
    def remove(self, id_: str, on_start: Callable[[Identity], None] = calls.nobody) -> None:
        """End a container and take it away.

        Raises:
            FailedUndone: it is still there.
        """

    @abstractmethod
    def made_as(self, name: str, operation: str, record: ContainerRecord) -> str:
        """Return the name under which an operation makes a container that is to be called so."""

    @abstractmethod
    def rename(self, contained: Contained, name: str) -> None:
        """Give a container that an operation has made the name that it is to have.

        Raises:
            FailedUndone: another has that name by now.
        """

    @abstractmethod
    def remove_made(self, word: str, bundle: str, operation: str) -> None:
        """Take a container away that an operation has begun to make, if it is there.

        Args:
            word: its id, or what :meth:`made_as` has said.
            bundle: its bundle.
            operation: the operation's id; "" where the runtime has told that it made a container of that id.

        Raises:
            FailedUndone: it is still there.
        """

    def to_make(self, record: ContainerRecord) -> list[str]:
        """Return the volumes that a restore has to make, and to fill from its image."""
        del record
        return []

    def remove_volumes(self, names: Sequence[str], since: float, until: float) -> None:
        """Remove volumes that a restore which failed has made: what is in them may be a half, or nothing.

        Args:
            names: as :meth:`to_make` has said before.
            since: when it began, in seconds since the epoch: what was made before, or later than it was at work, is
                another's.
            until: when it had ended.

        Raises:
            FailedUndone: one is still there; the next restore would take it for the job's.
        """
        del names, since, until

    def is_paused(self, word: str) -> bool:
        """Return whether somebody has told it to pause the container of such a word, as :meth:`find` takes it."""
        found = self.find(word)
        return found is not None and found.paused

    def has_begun_to_end(self, word: str, init: Identity, freezer: str) -> bool:
        """Return whether this runtime has begun to end a container that stands still, or does not know it any more.

        podman that was killed over it keeps it as "stopping", and forgets it the next time, while it lives (4.3).

        Args:
            word: which, as :meth:`find` takes it.
            init: its first process, which lives.
            freezer: the folder of the cgroup that holds it still.

        Raises:
            FailedUndone: the runtime does not say.
            OSError: the cgroup cannot be read.
        """
        found = self.find(word)
        if found is not None and not found.removed and not (found.ending and found.init == init):
            return False
        return is_frozen(freezer)

    def word_of(self, contained: Contained) -> str:
        """Return what :meth:`remove` takes for a container, also when it does not run any more."""
        return contained.id

    def _run(self, *arguments: str, **options: Any) -> Said:
        return calls.call([self.program, *arguments], self.configured, **options)

    def _state(self, id_: str) -> State | None:
        return next((s for s in states(self.notes) if s.id == id_), None)


def flags(kept: Kept) -> list[str]:
    """Return what podman and runc call these options."""
    given = ["--tcp-established"] if kept.tcp_established else []
    return [*given, *(["--file-locks"] if kept.file_locks else [])]


def sockets(kept: Kept) -> list[str]:
    """Return what runc calls that option."""
    return ["--ext-unix-sk"] if kept.ext_unix_sk else []


def living(pid: int) -> Identity | None:
    """Return who has a pid now; None for nobody."""
    if pid <= 0:
        return None
    with contextlib.suppress(LimosaError):
        return Identity.of(pid)
    return None


def alive(identity: Identity) -> Identity | None:
    """Return it where it lives, else None."""
    return identity if identity.pid > 0 and identity.alive() else None


def end(init: Identity, cgroups: Iterable[str] = ()) -> None:
    """End a container: with its first process all end, and the job's memory goes.

    Args:
        init: that process.
        cgroups: the container's, by their folders; one may hold it still, and does not afterwards.

    Raises:
        FailedUndone: it does not end.
    """
    v1 = [folder for folder in cgroups if os.path.exists(f"{folder}/freezer.state")]
    if init.pid > 0:  # else it was made, and never began
        with contextlib.suppress(NoSuchProcess, PidReused, Zombie), Handle(init) as handle:
            handle.signal(signal.SIGKILL)
            for folder in v1:  # what is frozen does not end. It does nothing else any more
                _let_go(folder)
            if not handle.wait(END_SECONDS):
                raise FailedUndone(what="ending the container", detail=f"process {init.pid} does not end")
    for folder in cgroups:  # else runc calls it paused, also when nothing of it lives
        _let_go(folder)


def _let_go(folder: str) -> None:
    with contextlib.suppress(OSError):
        thaw(folder)


def criu_said(path: str) -> str:
    """Return the cause that CRIU's log names; "" where there is none."""
    if not os.path.isabs(path) or not start.trusted(path):
        return ""
    with contextlib.suppress(OSError), open(path, "rb") as log:
        return _named(cause(log.read(64 << 20).decode(errors="replace"), 0))
    return ""


def criu_said_in(folder: int, name: str) -> str:
    """Return the cause that CRIU's log in an open folder names; "" where there is none."""
    with contextlib.suppress(OSError):
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        with open(fd, "rb") as log:
            return _named(cause(log.read(64 << 20).decode(errors="replace"), 0))
    return ""


def _named(found: Cause) -> str:
    return f"CRIU: {found.text}" if found.raw else ""
