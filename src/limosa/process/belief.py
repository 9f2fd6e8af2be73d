"""Decides what Limosa believes of files that others wrote into the runtime folder. No other module reads them.

A user may write anything into his folder, and exchange it while it is read. So a file counts only if its name has the
one form, if it is a regular file of that user in a folder of his, and if it is not too large. Each user has a maximum
of files and bytes of each kind. The rest is not looked at, which concerns only him. The content is decoded into types
with bounds (``Text``, ``Size``, ``Time`` …). Each reader asks here (``Processes``) whether the writer may speak for the
process in question: a user may for his own, root for all.

Root removes something in a user's folder by the folder's descriptor, so only where the user could do it himself.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from typing import Annotated, NamedTuple, TypeVar

import msgspec

from limosa.errors import LimosaError
from limosa.process import runtime
from limosa.process.identity import Identity
from limosa.process.openat import closing, open_in
from limosa.process.places import Folder, folders, if_there, own_folder
from limosa.process.status import uids_of
from limosa.structs import ready

MOST_BYTES = 1 << 20
"""Bytes of one file: a claim on 20,000 processes."""
MOST_FILES = 1_000
"""Files of one kind of one user."""
_MOST_OF_ALL = 4 << 20  # bytes of one kind of one user
# Of all other users together: one may have thousands of user ids (/etc/subuid). The lowest are read first; past that
# each has room for some ordinary files.
_MOST_OF_OTHERS, _LEAST_OF_ONE = 32 << 20, 64 << 10
_MOST_NAMES = 20_000  # names that are looked at to find them
_OWN_BYTES, _OWN_OF_ALL = 16 << 20, 256 << 20  # of the caller's own and of root's
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}", re.ASCII)
_LISTED = (".json", ".jsonl")

Text = Annotated[str, msgspec.Meta(max_length=256)]
PathText = Annotated[str, msgspec.Meta(max_length=4096)]
Id = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9_][A-Za-z0-9._-]{0,100}\Z")]
"""Of an operation: its files are called that."""
Word = Annotated[str, msgspec.Meta(pattern=r"\A[a-z-]{1,32}\Z")]
"""A verb."""
Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 50)]
Time = Annotated[float, msgspec.Meta(ge=0, le=1e11)]
"""Seconds since the epoch; what is larger has no year."""
Sizes = Annotated[dict[Text, Size], msgspec.Meta(max_length=1024)]
"""Bytes by GPU UUID."""

T = TypeVar("T")


class Note(NamedTuple):
    """A file: who wrote it, what it is called, what it says."""

    owner: int
    name: str
    data: bytes

    @property
    def stem(self) -> str:
        """The name without what it ends in."""
        return self.name.rpartition(".")[0]


def read(kind: str, uid: int | None = None, *, whole: bool = False) -> list[Note]:
    """Everybody's files of one kind (or one user's), the caller's first; by name for each.

    What cannot be read is passed over.

    Raises:
        FailedUndone: with ``whole``: nobody can say what the caller, root or the user who is asked for has there.
    """
    found: list[Note] = []
    others = _MOST_OF_OTHERS
    with folders(kind, uid, whole=whole) as everybodys:
        for folder in everybodys:
            most = min(_MOST_OF_ALL, max(_LEAST_OF_ONE, others))
            trusted = _trusted(folder)
            one, left = (_OWN_BYTES, _OWN_OF_ALL) if trusted else (MOST_BYTES, most)
            sure = whole and (uid is not None or trusted)
            for name in _names(folder, sure):
                data = _bytes(folder, name, min(left, one), sure)
                if data is not None:
                    left -= len(data)
                    others -= 0 if trusted else len(data)
                    found.append(Note(folder.uid, name, data))
    return found


def read_called(kind: str, name: str, *, whole: bool = False) -> list[Note]:
    """Everybody's file of that kind and name.

    Raises:
        FailedUndone: with ``whole``: nobody can say whether the caller or root has it.
    """
    if not _NAME.fullmatch(name):
        return []
    with folders(kind, whole=whole) as everybodys:
        read_ = [
            (f.uid, _bytes(f, name, _OWN_BYTES if _trusted(f) else MOST_BYTES, whole and _trusted(f)))
            for f in everybodys
        ]
    return [Note(owner, name, data) for owner, data in read_ if data is not None]


def named(kind: str, uid: int | None = None, *, whole: bool = True) -> set[tuple[int, str]]:
    """Owners and names of files of one kind that are there and not empty, whether or not the caller may read them.

    Raises:
        FailedUndone: with ``whole``: nobody can say what the caller, root or the user who is asked for has there.
    """
    found: set[tuple[int, str]] = set()
    with folders(kind, uid, whole=whole) as everybodys:
        for folder in everybodys:
            sure = whole and (uid is not None or _trusted(folder))
            for name in _names(folder, sure):
                with if_there(folder.path, folder.uid, sure), closing(open_in(folder.fd, name, os.O_PATH)) as fd:
                    if _is_file_of(os.fstat(fd), folder.uid) and os.fstat(fd).st_size:
                        found.add((folder.uid, name))
    return found


def remove(kind: str, name: str, uid: int | None = None) -> None:
    """Remove a file from every folder that the caller may write to (root: everybody's).

    One that cannot be removed is emptied, so that it says nothing any more. The caller's own goes by its path: that
    needs no descriptor, and where there is none left a claim would keep its job busy.
    """
    if not _NAME.fullmatch(name):
        return
    if uid in (None, os.geteuid()):
        with contextlib.suppress(OSError, LimosaError):
            runtime.remove_or_empty(own_folder(kind) / name)
    with folders(kind, uid) as everybodys:
        for folder in everybodys:
            try:
                os.unlink(name, dir_fd=folder.fd)
            except FileNotFoundError:
                continue
            except OSError:
                with contextlib.suppress(OSError), closing(open_in(folder.fd, name, os.O_WRONLY)) as fd:
                    if _is_file_of(os.fstat(fd), folder.uid):
                        os.ftruncate(fd, 0)


def decoded(data: bytes, type_: type[T]) -> T | None:
    """What a file says, or None where it says something else."""
    try:
        return msgspec.json.decode(data, type=ready(type_))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _trusted(folder: Folder) -> bool:
    return folder.uid in (0, os.geteuid())


def _names(folder: Folder, sure: bool = False) -> list[str]:
    """Names of the one form in a folder, sorted; not all where another user has too many."""
    found: list[str] = []
    with if_there(folder.path, folder.uid, sure), os.scandir(folder.fd) as entries:
        for n, entry in enumerate(entries):
            if not _trusted(folder) and (n >= _MOST_NAMES or len(found) >= MOST_FILES):
                break
            if entry.name.endswith(_LISTED) and _NAME.fullmatch(entry.name):
                found.append(entry.name)
    return sorted(found)


def _bytes(folder: Folder, name: str, most: int, sure: bool = False) -> bytes | None:
    """A file's content; None if it is no file of the folder's owner, or has more than that."""
    with if_there(folder.path, folder.uid, sure), closing(open_in(folder.fd, name, os.O_RDONLY)) as fd:
        if not _is_file_of(os.fstat(fd), folder.uid):
            return None
        data = b""
        while len(data) <= most and (more := os.read(fd, most + 1 - len(data))):
            data += more
        return data if len(data) <= most else None
    return None


def _is_file_of(found: os.stat_result, uid: int) -> bool:
    return stat.S_ISREG(found.st_mode) and found.st_uid == uid


class Processes:
    """The owners of the processes that files are about: looked up once for many files, as of now."""

    def __init__(self) -> None:
        self._there: set[str] | None = None
        self._owners: dict[Identity, int] = {}

    def speaks_for(self, owner: int, identity: Identity) -> bool:
        """Whether a user may speak for a process: it lives and is his, or he is root."""
        return owner == 0 or self.owner_of(identity) == owner

    def owner_of(self, identity: Identity) -> int:
        """The uid with which a process runs; -1 where it has ended, or has several (it is about to change them)."""
        if self._there is None:
            self._there = set(os.listdir("/proc"))
        if str(identity.pid) not in self._there:
            return -1
        if identity not in self._owners:
            self._owners[identity] = _owner_of(identity)
        return self._owners[identity]


def _owner_of(identity: Identity) -> int:
    try:
        uids = owners_of(identity.pid)
        return uids.pop() if len(uids) == 1 and identity.alive() else -1
    except (LimosaError, OSError):
        return -1


def owners_of(pid: int) -> set[int]:
    """Return the uids that a process runs with (real, effective, saved, of the file system).

    Raises:
        OSError: it is gone.
    """
    return set(uids_of(pid))
