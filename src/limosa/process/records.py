"""Records: what this machine remembers about jobs while they live, kept in the runtime folder (``places``).

A record is believed only if the owner of its folder also owns the process, or is root.
A record of a process that has ended, or of another boot, is stale.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, ClassVar, TypeVar

import msgspec

from limosa.errors import NoSuchProcess, UsageError
from limosa.process import belief, device_nodes
from limosa.process.belief import PathText, Processes, Sizes, Text, Time
from limosa.process.identity import Identity, boot_id
from limosa.process.namespaces import namespace_of
from limosa.process.places import own_folder
from limosa.process.runtime import write_atomic
from limosa.terms import Release

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9._-]{0,63}", re.ASCII)
_MOST_COMMAND = 64 << 10  # bytes of a command that are remembered
R = TypeVar("R", bound="Record")
Name = Annotated[str, msgspec.Meta(pattern=rf"\A({_NAME.pattern})?\Z")]


def _is_the_callers(identity: Identity) -> bool:
    return Processes().owner_of(identity) == os.geteuid()


def _shown(text: str) -> str:
    return text.encode(errors="replace").decode()


def belongs_to_root(identity: Identity) -> bool:
    """Whether it is root's process, of which only root's records count."""
    return Processes().owner_of(identity) == 0


class Record(msgspec.Struct, kw_only=True):
    """What all records share: which process they are about, since when, in which boot.

    Attributes:
        root: the job's topmost process.
        since: when it was written, seconds since the epoch.
        boot: the kernel's boot id; a record of another boot is stale whatever its pid.
        pids: the pid namespace that the pids are of (an inode), 0 where that is not known. One of another namespace (of
            a container that shares the folder) says nothing here, and is not ours to remove.
    """

    kind: ClassVar[str] = ""
    root: Identity
    since: Time = msgspec.field(default_factory=time.time)
    boot: Text = msgspec.field(default_factory=boot_id)
    pids: int = msgspec.field(default_factory=lambda: (namespace_of("self", "pid") or (0, 0))[1])

    def _file(self) -> str:
        return f"{self.root.pid}-{self.root.start_time}.json"

    def save(self) -> Path:
        """Writes the record into the caller's folder, in place of an older one.

        Raises:
            PermissionDenied: the runtime folder is somebody else's.
            OSError: it cannot be written.
        """
        path = own_folder(self.kind) / self._file()
        write_atomic(path, msgspec.json.encode(self))
        return path

    def forget(self) -> None:
        """Removes every record of this kind about this process that the caller may remove (root: all of them)."""
        belief.remove(self.kind, self._file())

    def believed(self, owner: int, processes: Processes) -> bool:
        """Whether a record in the folder of uid ``owner`` counts: the process lives and he may speak for it.

        What of it he may not say is taken out of it.
        """
        if self.boot != boot_id() or not self._of_here() or not self.root.alive():
            return False
        return processes.speaks_for(owner, self.root)

    def stale(self) -> bool:
        """Whether nobody needs the record any more."""
        return self.boot != boot_id() or (self._of_here() and not self.root.alive())

    def _of_here(self) -> bool:
        return self.pids in (0, (namespace_of("self", "pid") or (0, 0))[1])

    @classmethod
    def all(cls: type[R]) -> list[R]:
        """All records of this kind that count, one for each process (the newest), oldest first.

        Stale ones in the caller's own folder are removed on the way; what cannot be read is passed over.
        """
        best: dict[Identity, R] = {}
        removed: list[R] = []
        processes = Processes()
        for note in belief.read(cls.kind):
            record = cls._said(note)
            if record is None:
                continue
            if note.owner == os.geteuid() and record.stale():
                belief.remove(cls.kind, note.name, note.owner)
                removed.append(record)
            elif record.believed(note.owner, processes) and (
                record.root not in best or best[record.root].since < record.since
            ):
                best[record.root] = record
        for record in removed:
            record.clear_away(best.values())
        return sorted(best.values(), key=lambda r: r.since)

    def clear_away(self, others: Iterable[Record]) -> None:
        """Removes what belonged to the job, when its record is removed as stale and these count."""

    @classmethod
    def of(cls: type[R], root: Identity, *, whole: bool = False) -> R | None:
        """The newest record of this kind about ``root`` that counts, or None.

        Raises:
            FailedUndone: with ``whole``: nobody can say whether the caller or root has one.
        """
        processes = Processes()
        found = [
            record
            for note in belief.read_called(cls.kind, f"{root.pid}-{root.start_time}.json", whole=whole)
            if (record := cls._said(note)) is not None and record.believed(note.owner, processes)
        ]
        return max(found, key=lambda r: r.since, default=None)

    @classmethod
    def _said(cls: type[R], note: belief.Note) -> R | None:
        """What a file says; None where it is not called what it says it is."""
        record = belief.decoded(note.data, cls)
        return record if record is not None and record._file() == note.name else None


class RunRecord(Record, kw_only=True):
    """A job started by ``limosa run`` or brought back by ``limosa restore``.

    Attributes:
        name: what the user may call it; unique among living jobs.
        command: its argument vector.
        log: absolute path of the file its output goes to, or "".
        cwd: the folder it was started in.
        supervisor: the attached ``limosa run``, or None when detached.
        sees: the file that says which GPUs it sees (``device_nodes``); "" where ``limosa run --gpus`` hides none.
    """

    kind: ClassVar[str] = "jobs"
    name: Name
    command: list[str]
    log: PathText = ""
    cwd: PathText = ""
    supervisor: Identity | None = None
    sees: PathText = ""

    def save(self) -> Path:
        """As every record; a command that is very long is remembered as far as it goes.

        A record is JSON, and the job runs by now: what is no UTF-8 is there as well as it can be shown.
        """
        self.command = [_shown(word) for word in self.command]
        self.log, self.cwd = _shown(self.log), _shown(self.cwd)
        room = _MOST_COMMAND
        for n, word in enumerate(self.command):
            if (room := room - len(word) - 8) < 0:
                self.command = self.command[:n]
                break
        return super().save()

    def believed(self, owner: int, processes: Processes) -> bool:
        """As every record; and of what another's job sees root alone may speak."""
        if not super().believed(owner, processes):
            return False
        return not self.sees or owner in (0, device_nodes.owner(self.sees))

    def clear_away(self, others: Iterable[Record]) -> None:
        """Removes the file, unless a job that was restored from an image of this one has it now."""
        if self.sees and not any(isinstance(other, RunRecord) and other.sees == self.sees for other in others):
            device_nodes.forget(self.sees)


class SuspendRecord(Record, kw_only=True):
    """Limosa has suspended this job. What state it is in now is the driver's to say; this says since when and by whom.

    Attributes:
        by: the user's name.
        bytes: device memory it held, by GPU uuid.
        members: its processes that held CUDA state.
        held: device memory of each of them, pid (as text) → GPU uuid → bytes.
        moved: of each of them, pid (as text) → the GPU that it was on when it was suspended → the one where the driver
            knows it now, where these differ.
        release: what was given back: "all", or "memory-only" where their contexts are where they were.
    """

    kind: ClassVar[str] = "suspended"
    by: Text = ""
    bytes: Sizes = {}
    members: list[Identity] = []
    held: dict[Text, Sizes] = {}
    moved: dict[Text, Annotated[dict[Text, Text], msgspec.Meta(max_length=1024)]] = {}
    release: Release = Release.ALL

    def believed(self, owner: int, processes: Processes) -> bool:
        """As every record; of its members those count for which its writer may speak.

        ``limosa suspend --gpu`` by root takes the members for jobs: a user's record names none of another's.
        """
        self.members = [m for m in self.members if processes.speaks_for(owner, m)]
        return super().believed(owner, processes)


class EndedRecord(Record, kw_only=True):
    """A checkpoint ended this job; its attached ``limosa run`` names the image and exits 75.

    Write it before the job is let end. ``believed`` and ``stale`` differ from the others', as its process is gone:
    believed when written by root or by the reader's own user, stale after an hour.

    Attributes:
        image: the image's absolute path.
        image_id: the image's id.
        name: what the job was called.
    """

    kind: ClassVar[str] = "ended"
    image: PathText
    image_id: Text = ""
    name: Text = ""

    def believed(self, owner: int, processes: Processes) -> bool:
        """Whether the folder's owner is root or the reader himself."""
        return self.boot == boot_id() and owner in (0, os.geteuid())

    def stale(self) -> bool:
        """Whether nobody has asked for it for an hour."""
        return self.boot != boot_id() or time.time() - self.since > 3600


class ClonedRecord(Record, kw_only=True):
    """A container that ``limosa restore`` has brought back: others may have been made of the same.

    Attributes:
        origin: the id of the container that the first image was made of.
    """

    kind: ClassVar[str] = "cloned"
    origin: Text


def check_name(name: str) -> None:
    """Refuses a name that could be taken for a pid or a path, or that a living job has.

    Hold ``lock("jobs")`` from here until the new job's record is saved.

    Raises:
        UsageError: not a name, or taken.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(detail=f"{name!r} is not a name for a job (a letter, then letters, digits, '.', '_', '-')")
    taken = [r for r in RunRecord.all() if r.name == name]
    if taken:
        raise UsageError(
            detail=f"the name {name!r} is already taken by process {taken[0].root.pid}", hint="choose another --name"
        )


def job_named(name: str) -> RunRecord:
    """The living job of that name: the caller's own first, then others'.

    Raises:
        NoSuchProcess: there is none.
        UsageError: several users have one.
    """
    found = [r for r in RunRecord.all() if r.name == name]
    own = [r for r in found if _is_the_callers(r.root)]
    chosen = own or found
    if not chosen:
        hint = "limosa ps lists the jobs, limosa logs NAME finds the output of one that has ended; "
        hint += "a container is named with its runtime, as podman:NAME"
        raise NoSuchProcess(f"no living job is called {name!r}", pid=0, hint=hint)
    if len(chosen) > 1:
        pids = ", ".join(str(r.root.pid) for r in chosen)
        raise UsageError(detail=f"several jobs are called {name!r}: processes {pids}", hint="name the pid")
    return chosen[0]
