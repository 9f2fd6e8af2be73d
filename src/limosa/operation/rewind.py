"""Files that a restored job will go on with: there, of the size they had, or cut back to it.

CRIU compares the size of every regular file that was open or mapped, except those open for appending only (measured),
so a log written with "w" that has grown since, or an upgraded library, makes a restore fail. ``--rewind-files`` keeps
the tail of a grown file beside it and cuts the file back; undone, the file is as it was.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import shlex
import stat
from collections.abc import Collection, Iterator
from typing import BinaryIO

import msgspec

from limosa.errors import FailedUndone, Reason
from limosa.image import Manifest, OpenFile
from limosa.image.files import copy_sparse

_OF_A_PROCESS = re.compile(
    r"/proc/[0-9]+/(?!(task/[0-9]+/)?(root|cwd|exe|fd|map_files)(/|$))"
)  # in images of earlier versions: there as soon as the process is
_LONGEST = 255  # bytes of a name


class Rewind(msgspec.Struct, kw_only=True):
    """One file to be cut back.

    All of it is done in one open folder, whose path had no link in it, and to the very file that was looked at: the
    folder may be its user's, who could put a link to one of root's there at any time.
    """

    path: str  # the file
    size: int  # bytes it had when the job was checkpointed
    grown: int  # bytes it has now
    kept: str  # where its tail is kept: beside it, as its owner's
    inode: int = 0  # the file's inode number: another one under its name is another file

    def do(self) -> None:
        """Keeps the tail, on disk, then cuts the file. Raises OSError, and FailedUndone where it has changed again."""
        with self._folder() as folder, self._open(folder) as file:
            info = os.fstat(file.fileno())
            if info.st_size != self.grown:
                raise FailedUndone(what="restore", detail=f"{self.path} is being written to")
            there = os.fstatvfs(folder)
            if min(self.grown - self.size, info.st_blocks * 512) > there.f_bavail * there.f_frsize:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.kept)  # root might take the last of it
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            name = os.path.basename(self.kept)
            with open(os.open(name, flags, 0o600, dir_fd=folder), "wb") as tail:
                copy_sparse(file.fileno(), tail.fileno(), begin=self.size)
                os.fsync(tail.fileno())
                if os.geteuid() == 0:
                    os.fchown(tail.fileno(), info.st_uid, info.st_gid)
                os.fchmod(tail.fileno(), stat.S_IMODE(info.st_mode) & 0o666)
            file.truncate(self.size)

    def undo(self) -> None:
        """Puts the tail back, if it was cut, and removes the copy; FailedUndone: one is another, and both stay."""
        name = os.path.basename(self.kept)
        with self._folder() as folder:
            try:
                fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=folder)
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ENAMETOOLONG):  # it was never made
                    raise
                return
            with open(fd, "rb") as tail, self._open(folder) as file:
                made, info = os.fstat(fd), os.fstat(file.fileno())
                ours = made.st_uid in (os.geteuid(), info.st_uid) and made.st_nlink == 1
                if not stat.S_ISREG(made.st_mode) or not ours:
                    raise FailedUndone(what="undoing --rewind-files", detail=f"{self.kept} is not what was kept")
                # The file is cut only once its tail is whole and on disk. Its own size tells nothing: a restored job
                # may have written as much since.
                if made.st_size == self.grown - self.size:
                    file.truncate(self.size)
                    copy_sparse(tail.fileno(), file.fileno(), at=self.size)
                    os.fsync(file.fileno())
            os.unlink(name, dir_fd=folder)

    @contextlib.contextmanager
    def _folder(self) -> Iterator[int]:
        """The folder of both, open: no part of its path was a link when it was opened."""
        place = os.path.dirname(self.path)
        if os.path.dirname(self.kept) != place:
            raise FailedUndone(what="restore", detail=f"{self.kept} is not beside {self.path}")
        try:
            fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError) as error:  # a link is no directory
            raise FailedUndone(what="restore", detail=f"{place} is gone, or leads elsewhere") from error
        try:
            if os.readlink(f"/proc/self/fd/{fd}") != place:
                raise FailedUndone(what="restore", detail=f"{place} leads through a symbolic link now")
            yield fd
        finally:
            os.close(fd)

    def _open(self, folder: int) -> BinaryIO:
        name = os.path.basename(self.path)
        try:
            fd = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=folder)
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.ENOENT):
                raise
            raise FailedUndone(what="restore", detail=f"{self.path} is another file than before") from error
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or self.inode not in (0, info.st_ino):
            os.close(fd)
            raise FailedUndone(what="restore", detail=f"{self.path} is another file than before")
        return open(fd, "r+b")


def changed_files(
    manifest: Manifest, rewind: bool, comes_anew: Collection[str] = ()
) -> tuple[list[Reason], list[Rewind]]:
    """What stands in the way among the files that the job had open or mapped, and what can be cut back.

    ``rewind``: files that have grown may be, if the job had them open for writing. ``comes_anew``: is made before CRIU.
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
        info = os.stat(path, follow_symlinks=False)
    except OSError as error:
        text = f"{path} is missing ({error.strerror}); {who}"
        return Reason(id="file-missing", text=text, exit_code=23, hint="put it back", pid=uses[0].pid)
    if not stat.S_ISREG(info.st_mode):
        return Reason(id="file-changed", text=f"{path} is no regular file any more; {who}", exit_code=23)
    if uses[0].mode not in (0, info.st_mode):
        had, has = stat.S_IMODE(uses[0].mode), stat.S_IMODE(info.st_mode)
        text = f"{path} has the mode {has:04o} and had {had:04o}; {who}"
        hint = f"chmod {had:o} {shlex.quote(path)}"
        return Reason(id="file-changed", text=text, exit_code=23, hint=hint, pid=uses[0].pid)
    if info.st_size == size or all(_appends_only(f) for f in uses):
        return None
    text = f"{path} has {info.st_size} bytes and had {size}; {who}"
    grown_by_job = info.st_size > size and any(f.position is not None for f in uses)
    if not grown_by_job or not rewind:
        hint = "put the old one back; a library that was upgraded must be the one the job started with"
        hint = "--rewind-files keeps its new part beside it and cuts it back" if grown_by_job else hint
        return Reason(id="file-changed", text=text, exit_code=23, hint=hint, pid=uses[0].pid)
    kept = _free_name(path, manifest, info.st_size)
    todo.append(Rewind(path=path, size=size, grown=info.st_size, kept=kept, inode=info.st_ino))
    return None


def _free_name(path: str, manifest: Manifest, size: int) -> str:
    """Where the tail is kept: a name that no earlier rewind of the same file to the same image has taken."""
    folder, name = os.path.split(os.fsencode(path))
    after = f".after-{manifest.created.replace(':', '').replace('-', '')}.{size}"
    ends = (after if n == 1 else f"{after}-{n}" for n in itertools.count(1))
    names = (os.fsdecode(os.path.join(folder, name[: _LONGEST - len(end)] + end.encode())) for end in ends)
    return next(name for name in names if not os.path.lexists(name))


def _appends_only(file: OpenFile) -> bool:
    """Whether CRIU leaves this descriptor's size alone: write-only and appending."""
    return file.fd is not None and file.flags & os.O_ACCMODE == os.O_WRONLY and bool(file.flags & os.O_APPEND)
