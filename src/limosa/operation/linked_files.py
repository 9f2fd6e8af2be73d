"""Files that lost the name by which the job has them and have another one, such as the C library's semaphores.

CRIU gives each of them a name again while it dumps (``link_remap.N`` in the folder where it was, ``criu --link-remap``)
and wants it there at a restore, which takes it away. Where a job runs on, CRIU takes it away at once; a restart of the
machine does, too, in /dev/shm; and an image may be restored twice, or elsewhere. So an image says what other names such
a file had, and small ones are inside it: a restore makes the name again, from another name of the same file or from the
copy. What is in a file in /dev/shm is the job's state: it is put back as it was.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterable

import msgspec

from limosa.errors import FailedUndone, Reason
from limosa.image import LinkedFile, Manifest
from limosa.process import hazards
from limosa.process.observation import JobObservation

_REMAP = re.compile(r"link_remap\.\d+\Z")  # files-reg.c of CRIU
_COPY_LIMIT = hazards.GHOST_LIMIT
_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - shm_overview(7), sem_overview(7)


# --- dumping --------------------------------------------------------------------------------------------------


def copy_linked_files(observation: JobObservation | None, criu_fd: int) -> list[LinkedFile]:
    """What CRIU has given a name again, read while it holds the tree frozen; small ones are copied into the image.

    Args:
        observation: which files they are: what the job had when it was looked at.
        criu_fd: descriptor of the image's folder ``criu/``.

    Raises:
        OSError: a copy cannot be written.
    """
    found: list[LinkedFile] = []
    its: dict[str, set[int]] = {}
    for process in observation.processes if observation else []:
        for name, had in hazards.renamed_files(process).items():
            its.setdefault(os.path.dirname(name), set()).add(had.inode)
    for folder, inodes in its.items():
        by_inode: dict[int, list[str]] = {}
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                if entry.inode() in inodes:
                    by_inode.setdefault(entry.inode(), []).append(entry.path)
        for inode, paths in sorted(by_inode.items()):
            names = [path for path in paths if not _REMAP.search(path)]
            for path in paths:
                if _REMAP.search(path):
                    with contextlib.suppress(FileNotFoundError):
                        found.append(_read(path, inode, names, criu_fd, len(found)))
    return found


def _read(path: str, inode: int, names: list[str], criu_fd: int, number: int) -> LinkedFile:
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        info = os.fstat(file.fileno())
        copy = ""
        if stat.S_ISREG(info.st_mode) and info.st_size <= _COPY_LIMIT:
            copy = f"linked-{number}.img"
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with open(os.open(copy, flags, 0o600, dir_fd=criu_fd), "wb") as kept:
                kept.write(file.read(_COPY_LIMIT))
    return LinkedFile(
        path=path,
        names=sorted(names),
        size=info.st_size,
        mode=info.st_mode,
        uid=info.st_uid,
        gid=info.st_gid,
        inode=inode,
        copy=f"criu/{copy}" if copy else "",
    )


# --- restoring ------------------------------------------------------------------------------------------------


class Relink(msgspec.Struct, kw_only=True):
    """A file to which its names, and its content where that is the job's state, are given back.

    Attributes:
        file: what it was.
        name: a name that it has, or "": it is made from the copy.
        made: names that were made.
    """

    file: LinkedFile
    name: str = ""
    made: list[str] = []

    @property
    def missing(self) -> list[str]:
        """The names that it has to get."""
        return [name for name in (self.file.path, *self.file.names) if not os.path.lexists(name)]

    def do(self, criu_fd: int) -> None:
        """Makes it as it was.

        Args:
            criu_fd: descriptor of the image's folder ``criu/``.

        Raises:
            FailedUndone: that cannot be done; no name was made.
        """
        try:
            missing = self.missing
            if not self.name:
                self._make(missing.pop(0), self._kept(criu_fd))
            elif _in_memory(self.file):
                with open(os.open(self.name, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "wb") as file:
                    if os.fstat(file.fileno()).st_ino == self.file.inode:
                        file.write(self._kept(criu_fd))
            for name in missing:
                os.link(self.name or self.file.path, name, follow_symlinks=False)
                self.made.append(name)
        except OSError as error:
            self.undo()
            raise FailedUndone(what="restore", detail=f"{self.file.path} cannot be made: {error.strerror}") from error

    def _make(self, path: str, content: bytes) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(path, flags, 0o600), "wb") as file:
            self.made.append(path)
            file.write(content)
            os.fchown(file.fileno(), self.file.uid, self.file.gid)
            os.fchmod(file.fileno(), stat.S_IMODE(self.file.mode))

    def _kept(self, criu_fd: int) -> bytes:
        copy = self.file.copy.removeprefix("criu/")
        with open(os.open(copy, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=criu_fd), "rb") as kept:
            return kept.read(_COPY_LIMIT)

    def undo(self) -> None:
        """Takes away the names that were made and are still that file's."""
        for name in reversed(self.made):
            with contextlib.suppress(OSError):
                if _is(name, self.file, any_inode=not self.name):
                    os.unlink(name)
        self.made = []


def names_to_make(manifest: Manifest) -> tuple[list[Reason], list[Relink]]:
    """What stands in the way among such files, and what has to be done with the others."""
    reasons: list[Reason] = []
    todo: list[Relink] = []
    for file in manifest.linked_files:
        folder = os.path.dirname(file.path)
        name = next((name for name in (file.path, *file.names) if _is(name, file)), "")
        if os.path.realpath(folder) != folder or any(os.path.dirname(name) != folder for name in file.names):
            text = f"{folder} leads through a symbolic link now"
            reasons.append(Reason(id="file-changed", text=text, exit_code=23))
        elif os.path.lexists(file.path) and name != file.path:
            text = f"{file.path} is another file than the one that CRIU named so for this image"
            hint = "another image may need it: restore or remove that one first"
            reasons.append(Reason(id="file-changed", text=text, exit_code=23, hint=hint))
        elif name or file.copy:
            todo.append(Relink(file=file, name=name))
        else:
            text = f"none of the names of a file that the job has is there any more ({', '.join(file.names) or folder})"
            reasons.append(Reason(id="file-missing", text=text, exit_code=23, hint="put it back"))
    return reasons, todo


def _in_memory(file: LinkedFile) -> bool:
    """Whether its content is as the image has it after a restore: a semaphore is the job's state, a log is not."""
    return bool(file.copy) and os.path.dirname(file.path) == _SHARED_MEMORY


def take_away(files: Iterable[LinkedFile]) -> None:
    """Removes the names that CRIU made for an image that is going."""
    for file in files:
        with contextlib.suppress(OSError):
            if _is(file.path, file):
                os.unlink(file.path)


def _is(path: str, file: LinkedFile, *, any_inode: bool = False) -> bool:
    """Whether that is the file, or one that was made from its copy."""
    try:
        info = os.lstat(path)
    except OSError:
        return False
    same = (info.st_size, info.st_mode, info.st_uid, info.st_gid) == (file.size, file.mode, file.uid, file.gid)
    return same and (any_inode or info.st_ino == file.inode)
