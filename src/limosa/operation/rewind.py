"""Files that a restored job will go on with: there, of the size they had, or cut back to it.

CRIU compares the size of every regular file that was open or mapped, except those open for appending only (measured),
so a log written with "w" that has grown since, or an upgraded library, makes a restore fail. ``--rewind-files`` keeps
the tail of a grown file beside it and cuts the file back; undone, the file is as it was.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
import shutil
import stat
from collections.abc import Collection
from typing import BinaryIO

import msgspec

from limosa.errors import FailedUndone, Reason
from limosa.image import Manifest, OpenFile

_OF_A_PROCESS = re.compile(
    r"/proc/[0-9]+/(?!(task/[0-9]+/)?(root|cwd|exe|fd|map_files)(/|$))"
)  # in images of earlier versions: there as soon as the process is


class Rewind(msgspec.Struct, kw_only=True):
    """One file to be cut back.

    Attributes:
        path: the file.
        size: bytes it had when the job was checkpointed.
        grown: bytes it has now.
        kept: where its tail is kept.
        inode: the file's inode number: another one under its name is another file.
    """

    path: str
    size: int
    grown: int
    kept: str
    inode: int = 0

    def do(self) -> None:
        """Keeps the tail, on disk, then cuts the file.

        Raises:
            OSError: no room, no permission.
            FailedUndone: the file has changed again meanwhile.
        """
        with self._open() as file:
            if os.fstat(file.fileno()).st_size != self.grown:
                raise FailedUndone(what="restore", detail=f"{self.path} is being written to")
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o666
            fd = os.open(self.kept, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
            with open(fd, "wb") as tail:
                file.seek(self.size)
                shutil.copyfileobj(file, tail, 1 << 20)
                tail.flush()
                os.fsync(fd)
            file.truncate(self.size)

    def undo(self) -> None:
        """Puts the tail back and removes the copy; does nothing where nothing was cut.

        Raises:
            FailedUndone: the file or the copy is not the one that was made; both are left as they are.
        """
        try:
            fd = os.open(self.kept, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            return
        with open(fd, "rb") as tail, self._open() as file:
            made = os.fstat(fd)
            if not stat.S_ISREG(made.st_mode) or made.st_uid != os.geteuid() or made.st_nlink != 1:
                raise FailedUndone(what="undoing --rewind-files", detail=f"{self.kept} is not what was kept")
            # The file is cut only once its tail is whole and on disk. Its own size tells nothing: a restored job may
            # have written as much since.
            if made.st_size == self.grown - self.size:
                file.truncate(self.size)
                file.seek(self.size)
                shutil.copyfileobj(tail, file, 1 << 20)
                file.flush()
                os.fsync(file.fileno())
        os.unlink(self.kept)

    def _open(self) -> BinaryIO:
        """The very file, for reading and writing: no link is followed, in no part of its path."""
        fd = os.open(self.path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        info = os.fstat(fd)
        same = os.readlink(f"/proc/self/fd/{fd}") == self.path and self.inode in (0, info.st_ino)
        if not stat.S_ISREG(info.st_mode) or not same:
            os.close(fd)
            raise FailedUndone(what="restore", detail=f"{self.path} is another file than before")
        return open(fd, "r+b")


def changed_files(
    manifest: Manifest, rewind: bool, comes_anew: Collection[str] = ()
) -> tuple[list[Reason], list[Rewind]]:
    """What stands in the way among the files that the job had open or mapped, and what can be cut back.

    Args:
        manifest: the image's.
        rewind: whether grown files may be cut back (only those the job had open for writing).
        comes_anew: names that are made anew before CRIU looks.
    """
    reasons: list[Reason] = []
    todo: list[Rewind] = []
    by_path: dict[str, list[OpenFile]] = {}
    for file in manifest.open_files:
        if not file.deleted and file.path not in comes_anew and not _OF_A_PROCESS.match(file.path):
            by_path.setdefault(file.path, []).append(file)
    for path, uses in by_path.items():
        reason = _one(path, uses, rewind, todo, manifest)
        if reason is not None:
            reasons.append(reason)
    return reasons, todo


def _one(path: str, uses: list[OpenFile], rewind: bool, todo: list[Rewind], manifest: Manifest) -> Reason | None:
    try:
        real = os.path.realpath(path)
    except OSError as error:  # a link of /proc that may not be read
        return Reason(id="file-missing", text=f"{path} cannot be looked at ({error.strerror})", exit_code=23)
    if real != path:  # what the kernel named had no links in it; do not follow new ones
        return Reason(id="file-changed", text=f"{path} leads through a symbolic link now", exit_code=23)
    size = uses[0].size
    who = f"process {uses[0].pid} had it " + ("mapped" if uses[0].fd is None else f"open as descriptor {uses[0].fd}")
    try:
        info = os.stat(path)
    except OSError as error:
        text = f"{path} is missing ({error.strerror}); {who}"
        return Reason(id="file-missing", text=text, exit_code=23, hint="put it back", pid=uses[0].pid)
    if not stat.S_ISREG(info.st_mode):
        return Reason(id="file-changed", text=f"{path} is no regular file any more; {who}", exit_code=23)
    if uses[0].mode not in (0, info.st_mode):
        had, has = stat.S_IMODE(uses[0].mode), stat.S_IMODE(info.st_mode)
        text = f"{path} has the mode {has:04o} and had {had:04o}; {who}"
        return Reason(
            id="file-changed", text=text, exit_code=23, hint=f"chmod {had:o} {shlex.quote(path)}", pid=uses[0].pid
        )
    if info.st_size == size or all(_appends_only(f) for f in uses):
        return None
    text = f"{path} has {info.st_size} bytes and had {size}; {who}"
    grown_by_job = info.st_size > size and any(f.position is not None for f in uses)
    if not grown_by_job:
        hint = "put the old one back; a library that was upgraded must be the one the job started with"
        return Reason(id="file-changed", text=text, exit_code=23, hint=hint, pid=uses[0].pid)
    if not rewind:
        hint = "--rewind-files keeps its new part beside it and cuts it back"
        return Reason(id="file-changed", text=text, exit_code=23, hint=hint, pid=uses[0].pid)
    todo.append(Rewind(path=path, size=size, grown=info.st_size, kept=_free_name(path, manifest, info.st_size)))
    return None


def _free_name(path: str, manifest: Manifest, size: int) -> str:
    """Where the tail is kept: a name that no earlier rewind of the same file to the same image has taken."""
    wanted = f"{path}.after-{manifest.created.replace(':', '').replace('-', '')}.{size}"
    names = (wanted if n == 1 else f"{wanted}-{n}" for n in itertools.count(1))
    return next(name for name in names if not os.path.lexists(name))


def _appends_only(file: OpenFile) -> bool:
    """Whether CRIU leaves this descriptor's size alone: write-only and appending."""
    return file.fd is not None and file.flags & os.O_ACCMODE == os.O_WRONLY and bool(file.flags & os.O_APPEND)
