"""The journal: what an operation is about to do and has done, on disk before it is done.

One file an operation (``journals/<id>.jsonl`` in its maker's folder, 0600), a JSON line each: the :class:`Header`, then
a :class:`Record` for each begin and end of a step, each fsynced. Its writer holds an exclusive ``flock`` on it; a
journal that can be locked has lost its operation, and ``recover`` works from what it says and from what the driver
says. A finished operation removes its journal.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from limosa.errors import FailedUndone
from limosa.gpu import State
from limosa.process import belief
from limosa.process.identity import Identity, boot_id
from limosa.process.openat import nothing_there
from limosa.process.places import if_there, own_folder
from limosa.process.runtime import remove_emptied, sync_folder, unless_taken
from limosa.structs import ready
from limosa.terms import JobState, Term

KIND = "journals"
_LIMIT = 16 << 20  # bytes of a journal that are read
_MOST_TOLD = 100  # jobs of one operation that a summary names


class Phase(Term):
    """What a record says of its step."""

    BEGIN = "begin"
    DONE = "done"
    FAILED = "failed"
    NOTE = "note"


class Noted(Term):
    """The steps that a journal tells of, and what ``recover`` looks for in it.

    A name is for good: the journals of an older version are recovered by a newer one.
    """

    LOCK = "lock"
    CHECKPOINT = "checkpoint"
    RESTORE = "restore"
    UNLOCK = "unlock"
    RESTORE_HOME = "restore-home"
    PARK = "park"
    MAP = "map"
    OPEN = "open"
    UNKEEP = "unkeep"
    FREEZE = "freeze"
    DUMP = "dump"
    POST_DUMP = "post-dump"
    COMMIT = "commit"
    REWIND = "rewind"
    NAMES = "names"
    CRIU_RESTORE = "criu-restore"
    UNDO = "undo"
    COMMUNICATORS = "communicators"
    JOIN = "join"


class Member(msgspec.Struct, kw_only=True):
    """A process of a job that holds CUDA state."""

    identity: Identity  # pid and start time
    # its state before the operation (:class:`limosa.gpu.State`): "running", "locked" or "checkpointed"
    was: str = "running"
    home: dict[str, str] = {}  # the full identity map over the GPUs it can open (UUID → the same UUID)
    map: dict[str, str] = {}  # the full map it is to be restored with; equal to ``home`` where nothing changes
    held: dict[str, int] = {}  # device memory in bytes by GPU UUID (context included), as NVML saw it
    # the part of that which the driver carries, where the rest goes the parked way: once that is taken out of the
    # process, NVML may or may not count it as the process's
    beside: dict[str, int] = {}
    root: int = 0  # the pid of the job it belongs to
    # the file that says which GPUs it sees, where others are hidden from it (``limosa run --gpus``): each restore shows
    # it those that it is to be on. Else "".
    sees: str = ""
    sees_inside: str = ""  # the same, where it is a file of its container's, as that is called in there
    nodes: dict[str, int] = {}  # minor numbers of all GPUs by UUID, for these, or where it is boxed
    boxed: bool = False  # it has a container's /dev, in which each restore shows it the GPUs that it is to be on
    # where the GPUs of its arena are now: a resume elsewhere that was undone leaves it there, by the driver
    moved: dict[str, str] = {}
    away: bool = False  # its memory alone is suspended (``held`` is that then), and the driver knows nothing of it

    @property
    def pid(self) -> int:
        """The process id."""
        return self.identity.pid

    @property
    def bytes(self) -> int:
        """Device memory on all GPUs."""
        return sum(self.held.values())

    @property
    def changes_gpu(self) -> bool:
        """Whether the map moves it to another GPU."""
        return any(a != b for a, b in self.map.items())


def common_state(members: Iterable[Member]) -> str:
    """The state that all of them had before the operation, "mixed", or "running" where there is none.

    "parked": the memory of some is suspended, and the driver calls all of them "running".
    """
    members = list(members)
    states = {m.was for m in members} or {str(State.RUNNING)}
    if states == {State.RUNNING} and any(m.away for m in members):
        return JobState.PARKED
    return states.pop() if len(states) == 1 else JobState.MIXED


def added_up(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Bytes by GPU UUID, of several processes."""
    total: dict[str, int] = {}
    for part in parts:
        for uuid, size in part.items():
            total[uuid] = total.get(uuid, 0) + size
    return total


class Header(msgspec.Struct, kw_only=True):
    """The first line of a journal."""

    id: belief.Id  # the operation's id, also the journal's and the claim's file name
    operation: belief.Word  # the verb
    roots: list[Identity]  # the jobs' topmost processes
    members: list[Member] = []  # the processes that hold CUDA state, in locking order
    tree: list[Identity] = []  # every process of the job (for images)
    controller: Identity  # the process that works on it
    since: belief.Time = msgspec.field(default_factory=time.time)  # seconds since the epoch
    image: belief.PathText = ""  # the image folder to be written or restored, or ""
    draft: belief.PathText = ""  # the temporary folder of a checkpoint, or ""
    leave_running: bool = False  # a checkpoint's option
    # by which of the caller's variables runtimes are configured, where one is told of another GPU: whoever recovers has
    # others. What they name is looked at anew then.
    configured: Annotated[dict[belief.Text, belief.PathText], msgspec.Meta(max_length=16)] = {}
    boot: belief.Text = ""  # the kernel's boot id


class Record(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One line: a step begins, is done, or has failed."""

    step: str  # :class:`Noted`; a newer version may write others
    phase: str  # a :class:`Phase`: "begin", "done", "failed" or "note"
    pid: int = 0  # the process, or 0 for the whole job
    time: float = 0.0
    data: dict[str, Any] = {}  # what recover needs to know ("criu": its identity, "nft_table", "image_id" …)


class Journal:
    """An operation's journal, open and locked by its writer.

    The driver's worker holds a copy of the descriptor, and with it the lock: while it may still be in a call for a
    writer that has died nobody takes the journal, and the state of the job does not change behind his back.
    """

    def __init__(self, path: Path, fd: int, header: Header, entries: list[Record]):
        self.path, self._fd, self.header, self.records = path, fd, header, entries

    @classmethod
    def create(cls, header: Header) -> Journal:
        """Writes the header of a new journal; OSError: no room, no permission."""
        header.boot = boot_id()
        path = own_folder(KIND) / f"{header.id}.jsonl"
        return unless_taken(path, lambda: cls._create(path, header))

    @classmethod
    def _create(cls, path: Path, header: Header) -> Journal:
        # Made and locked under another name: one that recover could find is locked from its first moment on.
        part = path.with_suffix(".new")
        fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_APPEND, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            journal = cls(path, fd, header, [])
            journal._write(header)
            os.rename(part, path)
            sync_folder(path.parent)
        except BaseException:
            for name in (part, path):
                with contextlib.suppress(OSError):
                    os.unlink(name)
            os.close(fd)
            raise
        return journal

    @classmethod
    def take(cls, path: Path) -> Journal | None:
        """Opens the journal of a dead operation of the caller's own; None where somebody works on it, or it is gone.

        A file that is not the caller's, no regular file, or not called what it says it is, is none. FailedUndone: it is
        there, and cannot be read: this process can open no file more, say.
        """
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_APPEND | os.O_NONBLOCK)
        except OSError as error:
            if nothing_there(error, trusted=True):
                return None
            raise FailedUndone(f"{path} cannot be read: {error.strerror}") from error
        try:
            info = os.fstat(fd)
            if stat.S_ISREG(info.st_mode) and info.st_uid == os.geteuid():
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                parsed = _parse(os.pread(fd, _LIMIT, 0))
                if parsed is not None and parsed[0].id == path.stem and path.exists():
                    return cls(path, fd, *parsed)
        except BlockingIOError:
            pass
        except OSError as error:
            os.close(fd)
            raise FailedUndone(f"{path} cannot be read: {error.strerror}") from error
        os.close(fd)
        return None

    @property
    def fd(self) -> int:
        """The descriptor that it is locked by; -1 once it is closed."""
        return self._fd

    @property
    def of_another_boot(self) -> bool:
        """Whether the machine was started again since: no process that it names lives."""
        return self.header.boot != boot_id()

    def note(self, step: Noted, phase: Phase, pid: int = 0, **data: Any) -> None:
        """Appends a record and syncs it; OSError: it cannot be written, and the operation must not go on."""
        record = Record(step=step, phase=phase, pid=pid, time=time.time(), data=data)
        self._write(record)
        self.records.append(record)

    def try_note(self, step: Noted, phase: Phase, pid: int = 0, **data: Any) -> None:
        """As ``note``, for what is done whether it can be written down or not."""
        with contextlib.suppress(OSError):
            self.note(step, phase, pid, **data)

    def rewrite_header(self) -> None:
        """Appends the header again after a change; the last one counts."""
        self._write(self.header)

    def _write(self, line: Header | Record) -> None:
        tag = {"header": line} if isinstance(line, Header) else line
        data = msgspec.json.encode(tag) + b"\n"
        if (written := os.write(self._fd, data)) != len(data):
            # Half a line would hide all that come after it.
            os.ftruncate(self._fd, os.fstat(self._fd).st_size - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        os.fsync(self._fd)

    def last(self, step: Noted, pid: int | None = None) -> Record | None:
        """The newest record of that step (of that process)."""
        return next((r for r in reversed(self.records) if r.step == step and pid in (None, r.pid)), None)

    def began(self, step: Noted, pid: int | None = None) -> bool:
        """Whether that step was begun (of that process)."""
        return self.last(step, pid) is not None

    def finish(self) -> None:
        """Removes the journal, or empties it: nothing is left to recover; OSError: neither can be done."""
        try:
            os.unlink(self.path)
        except FileNotFoundError:
            pass
        except OSError:
            os.ftruncate(self._fd, 0)
        self.close()

    def close(self) -> None:
        """Lets go of the journal and leaves it for ``recover``."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                fcntl.flock(self._fd, fcntl.LOCK_UN)  # of the worker's copy as well
            os.close(self._fd)
            self._fd = -1


class Summary(msgspec.Struct, kw_only=True):
    """A journal in a sentence, for people and for ``-o json``."""

    id: str
    operation: str
    pids: list[int]
    step: str
    text: str
    alive: bool
    owner: int


def under_way() -> list[Summary]:
    """Every journal that the caller may read, with what it says was done last."""
    processes = belief.Processes()
    found = []
    for note in belief.read(KIND):
        parsed = _parse(note.data)
        if parsed is None or f"{parsed[0].id}.jsonl" != note.name:
            continue
        header, entries = parsed
        last = entries[-1] if entries else None
        step = f"{last.step} {last.phase}"[:80] if last else "planned"
        pids = [r.pid for r in header.roots][:_MOST_TOLD]
        where = f", image {header.image}" if header.image else ""
        alive = processes.speaks_for(note.owner, header.controller) and header.controller.alive()
        found.append(
            Summary(
                id=header.id,
                operation=header.operation,
                pids=pids,
                step=step,
                text=f"{header.operation} of {', '.join(map(str, pids)) or 'an image'}: last step {step}{where}",
                alive=header.boot == boot_id() and alive,
                owner=note.owner,
            )
        )
    return found


def dead(only: str | None = None) -> Iterator[Journal]:
    """The journals, taken one at a time, of the caller's operations that nobody works on any more.

    Root's own as well: what another user's journal says is not believed with root's rights (``recover`` has that user
    look at it). FailedUndone, after all others: one cannot be read, or nobody can say which there are.
    """
    folder, unread = own_folder(KIND), None
    names: list[str] = []
    remove_emptied(folder, "*.jsonl")  # finished, and could not be removed then (none begins empty)
    with if_there(folder, os.geteuid(), True), os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries if entry.name.endswith(".jsonl"))
    for path in (folder / name for name in names):
        if only is None or path.stem == only:
            try:
                journal = Journal.take(path)
            except FailedUndone as error:
                unread = error
                continue
            if journal is not None:
                yield journal
    if unread is not None:
        raise unread


def dead_of_others() -> list[Summary]:
    """What other users' dead operations left, for root."""
    return [s for s in under_way() if not s.alive and s.owner != os.geteuid()] if os.geteuid() == 0 else []


def path_of(operation_id: str) -> Path:
    """Where the caller's journal of that id lies."""
    return own_folder(KIND) / f"{operation_id}.jsonl"


class _HeaderLine(msgspec.Struct):
    header: Header


def _parse(data: bytes) -> tuple[Header, list[Record]] | None:
    """Header and records; a last line torn by a crash is dropped."""
    header: Header | None = None
    entries: list[Record] = []
    for line in data.split(b"\n"):
        try:
            if line.startswith(b'{"header"'):
                header = msgspec.json.decode(line, type=ready(_HeaderLine)).header
            elif line:
                entries.append(msgspec.json.decode(line, type=ready(Record)))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            break
    return (header, entries) if header is not None else None
