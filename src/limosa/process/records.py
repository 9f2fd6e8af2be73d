"""Records: what this machine remembers about jobs while they live, kept in the runtime folder (``runtime``).

A record is believed only where the owner of the folder that it lies in may speak for the process: it is his process,
or he is root. A record of a process that has ended, or of another boot, is stale.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar, TypeVar

import msgspec

from limosa.errors import NoSuchProcess, UsageError
from limosa.process import device_nodes
from limosa.process.identity import Identity, boot_id
from limosa.process.runtime import (
    RuntimeDir,
    entries,
    folders,
    lock,
    own_folder,
    read_owned,
    remove_emptied,
    remove_or_empty,
    runtime_dir,
    sync_folder,
    write_atomic,
)

__all__ = [
    "EndedRecord",
    "Record",
    "RunRecord",
    "RuntimeDir",
    "SuspendRecord",
    "belongs_to_root",
    "check_name",
    "folders",
    "job_named",
    "lock",
    "own_folder",
    "read_owned",
    "remove_emptied",
    "remove_or_empty",
    "runtime_dir",
    "sync_folder",
    "write_atomic",
]

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9._-]{0,63}")
R = TypeVar("R", bound="Record")


def _uid_of(identity: Identity) -> int | None:
    """The real uid of a living process (proc_pid_status(5)), or None where it is gone."""
    try:
        for line in Path(f"/proc/{identity.pid}/status").read_text().splitlines():
            if line.startswith("Uid:"):
                return int(line.split()[1])
    except OSError:
        return None
    return None


def belongs_to_root(identity: Identity) -> bool:
    """Whether it is root's process, of which only root's records count."""
    return _uid_of(identity) == 0


class Record(msgspec.Struct, kw_only=True):
    """What all records share: which process they are about, since when, in which boot.

    Attributes:
        root: the job's topmost process.
        since: when it was written, seconds since the epoch.
        boot: the kernel's boot id; a record of another boot is stale whatever its pid.
    """

    kind: ClassVar[str] = ""
    root: Identity
    since: float = msgspec.field(default_factory=time.time)
    boot: str = msgspec.field(default_factory=boot_id)

    def save(self) -> Path:
        """Writes the record into the caller's folder, in place of an older one.

        Raises:
            PermissionDenied: the runtime folder is somebody else's.
            OSError: it cannot be written.
        """
        path = own_folder(self.kind) / f"{self.root.pid}-{self.root.start_time}.json"
        write_atomic(path, msgspec.json.encode(self))
        return path

    def forget(self) -> None:
        """Removes every record of this kind about this process that the caller may remove (root: all of them)."""
        for _, folder in folders(self.kind):
            remove_or_empty(folder / f"{self.root.pid}-{self.root.start_time}.json")

    def believed(self, owner: int) -> bool:
        """Whether a record in the folder of uid ``owner`` counts: the process lives and he may speak for it."""
        if self.boot != boot_id() or not self.root.alive():
            return False
        return owner == 0 or owner == _uid_of(self.root)

    def stale(self) -> bool:
        """Whether nobody needs the record any more."""
        return self.boot != boot_id() or not self.root.alive()

    @classmethod
    def all(cls: type[R]) -> list[R]:
        """All records of this kind that count, one for each process (the newest), oldest first.

        Stale ones in the caller's own folder are removed on the way; what cannot be read is passed over.
        """
        best: dict[Identity, R] = {}
        removed: list[R] = []
        for owner, folder in folders(cls.kind):
            for path in entries(folder):
                record = cls._read(path, owner)
                if record is None:
                    continue
                if owner == os.geteuid() and record.stale():
                    with contextlib.suppress(OSError):
                        os.unlink(path)
                        removed.append(record)
                elif record.believed(owner) and (record.root not in best or best[record.root].since < record.since):
                    best[record.root] = record
        for record in removed:
            record.clear_away(best.values())
        return sorted(best.values(), key=lambda r: r.since)

    def clear_away(self, others: Iterable[Record]) -> None:
        """Removes what belonged to the job, when its record is removed as stale and these count."""

    @classmethod
    def of(cls: type[R], root: Identity) -> R | None:
        """The newest record of this kind about ``root`` that counts, or None."""
        found = [
            record
            for owner, folder in folders(cls.kind)
            if (record := cls._read(folder / f"{root.pid}-{root.start_time}.json", owner)) is not None
            and record.root == root
            and record.believed(owner)
        ]
        return max(found, key=lambda r: r.since, default=None)

    @classmethod
    def _read(cls: type[R], path: Path, owner: int) -> R | None:
        data = read_owned(path, owner) if path.suffix == ".json" and not path.name.startswith(".") else None
        if data is None:
            return None
        try:
            return msgspec.json.decode(data, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None


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
    name: str
    command: list[str]
    log: str = ""
    cwd: str = ""
    supervisor: Identity | None = None
    sees: str = ""

    def believed(self, owner: int) -> bool:
        """As every record; and of what another's job sees root alone may speak."""
        return super().believed(owner) and (not self.sees or owner in (0, device_nodes.owner(self.sees)))

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
    by: str = ""
    bytes: dict[str, int] = {}
    members: list[Identity] = []
    held: dict[str, dict[str, int]] = {}
    moved: dict[str, dict[str, str]] = {}
    release: str = "all"


class EndedRecord(Record, kw_only=True):
    """A checkpoint ended this job; its attached ``limosa run`` names the image and exits 75.

    Write it before the job is let end. ``believed`` and ``stale`` differ from the others', as its process is gone:
    believed when written by root or by the reader's own user, stale after an hour.

    Attributes:
        image: the image's absolute path.
        image_id: the image's id.
    """

    kind: ClassVar[str] = "ended"
    image: str
    image_id: str = ""

    def believed(self, owner: int) -> bool:
        """Whether the folder's owner is root or the reader himself."""
        return self.boot == boot_id() and owner in (0, os.geteuid())

    def stale(self) -> bool:
        """Whether nobody has asked for it for an hour."""
        return self.boot != boot_id() or time.time() - self.since > 3600


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
        raise UsageError(detail=f"process {taken[0].root.pid} is called {name!r} already", hint="choose another --name")


def job_named(name: str) -> RunRecord:
    """The living job of that name: the caller's own first, then others'.

    Raises:
        NoSuchProcess: there is none.
        UsageError: several users have one.
    """
    found = [r for r in RunRecord.all() if r.name == name]
    own = [r for r in found if _uid_of(r.root) == os.geteuid()]
    chosen = own or found
    if not chosen:
        raise NoSuchProcess(f"no living job is called {name!r}", pid=0)
    if len(chosen) > 1:
        pids = ", ".join(str(r.root.pid) for r in chosen)
        raise UsageError(detail=f"several jobs are called {name!r}: processes {pids}", hint="name the pid")
    return chosen[0]
