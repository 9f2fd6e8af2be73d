"""The few ways in which this package touches the disk, each relative to an open folder and never through a symlink.

``Files`` has every change in one place, so that tests can make the n-th one fail or die; reading needs no such seam.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from limosa.errors import LimosaError, NoRoomOnHost, PermissionDenied, UsageError
from limosa.start import file_system

FOLDER_MODE = 0o700
FILE_MODE = 0o600

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: a FIFO put where a file should be must not stop us; it means nothing for regular files.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


_TMPFS, _RAMFS = 0x01021994, 0x858458F6  # statfs(2)
# Where syncfs(2) does for every file what fsync(2) does: ext2 to ext4, XFS, Btrfs, F2FS, and tmpfs, which has no disk.
_SYNCED_WHOLE = {0xEF53, 0x58465342, 0x9123683E, 0xF2F52010, _TMPFS}
_AT_FDCWD, _RENAME_NOREPLACE = -100, 1  # renameat2(2)
_libc = ctypes.CDLL(None, use_errno=True)


class Files:
    """Every change this room makes to a disk. Names are single components relative to ``dir_fd``."""

    def mkdir(self, name: str, dir_fd: int) -> int:
        """Make a folder with mode 0700 whatever the umask, and open it.

        Raises:
            FileExistsError: the name is taken.
        """
        os.mkdir(name, FOLDER_MODE, dir_fd=dir_fd)
        fd = open_folder(name, dir_fd)
        try:
            # Whoever owns the folder around it may have. A file system that calls new folders another's (root's on NFS)
            # calls new files so, too.
            if os.listdir(fd) or os.fstat(fd).st_uid != _owner_of_new(fd):
                raise PermissionError(errno.EPERM, "somebody else has put another folder in its place", name)
            os.fchmod(fd, FOLDER_MODE)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def write(self, name: str, data: bytes, dir_fd: int) -> None:
        """Make a new file with mode 0600 and this content, on disk when it returns (its name not yet).

        Raises:
            FileExistsError: the name is taken.
        """
        fd = _written(name, data, dir_fd)
        try:
            self.fsync(fd)
        finally:
            os.close(fd)

    def put(self, name: str, data: bytes | memoryview, dir_fd: int) -> None:
        """As ``write``, but for putting it on disk.

        Raises:
            FileExistsError: the name is taken.
        """
        os.close(_written(name, data, dir_fd))

    def make(self, name: str, dir_fd: int) -> int:
        """Make a new empty file with mode 0600, and open it for writing.

        Raises:
            FileExistsError: the name is taken.
        """
        return _written(name, b"", dir_fd)

    def fsync(self, fd: int) -> None:
        """Put a file's content, or a folder's names, on disk."""
        os.fsync(fd)

    def syncfs(self, fd: int) -> None:
        """Put all of the file system on disk that an open file or folder is on (syncfs(2)).

        Raises:
            OSError: something could not be written since ``fd`` was opened.
        """
        if _libc.syncfs(fd):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def chmod(self, fd: int, mode: int) -> None:
        """Set the mode of an open file or folder."""
        os.fchmod(fd, mode)

    def rename(self, old: str, new: str, dir_fd: int) -> None:
        """Rename within a folder. A folder replaces an empty folder and nothing else (rename(2))."""
        os.rename(old, new, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)

    def rename_new(self, old: str, new: str, dir_fd: int) -> None:
        """Rename within a folder to a name that nobody has: see :func:`rename_new`."""
        rename_new(old, new, dir_fd)

    def unlink(self, name: str, dir_fd: int) -> None:
        """Remove a name that is not a folder's."""
        os.unlink(name, dir_fd=dir_fd)

    def rmdir(self, name: str, dir_fd: int) -> None:
        """Remove an empty folder."""
        os.rmdir(name, dir_fd=dir_fd)


def rename_new(old: str, new: str, dir_fd: int = _AT_FDCWD) -> None:
    """Rename to a name that nobody has (renameat2(2)); Python knows only the call that replaces a file.

    Args:
        old: a name in the folder, or a path where there is none.
        new: the same.
        dir_fd: the folder.

    Raises:
        OSError: somebody has it, or the C library or the file system cannot do this.
    """
    if not hasattr(_libc, "renameat2"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if _libc.renameat2(dir_fd, os.fsencode(old), dir_fd, os.fsencode(new), _RENAME_NOREPLACE):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), new)


def _written(name: str, data: bytes | memoryview, dir_fd: int) -> int:
    """A new file with mode 0600 and this content, open for writing."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(name, flags, FILE_MODE, dir_fd=dir_fd)
    try:
        os.fchmod(fd, FILE_MODE)
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_folder(name: str, dir_fd: int | None = None) -> int:
    """Open a folder; OSError (ELOOP, ENOTDIR) where it is a symlink or no folder."""
    return os.open(name, _FOLDER, dir_fd=dir_fd)


def open_file(name: str, dir_fd: int) -> int:
    """Open a regular file for reading.

    Raises:
        OSError: ELOOP for a symlink, EINVAL for anything else that is no regular file.
    """
    fd = os.open(name, _FILE, dir_fd=dir_fd)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", name)
    except BaseException:
        os.close(fd)
        raise
    return fd


def syncs_whole(fd: int) -> bool:
    """Whether ``Files.syncfs`` puts all files there on disk and says so where it could not: it does since Linux 5.8."""
    version = tuple(int(part) for part in re.findall(r"\d+", os.uname().release)[:2])
    return version >= (5, 8) and file_system(fd) in _SYNCED_WHOLE


def in_memory(fd: int) -> bool:
    """Whether what is written there is in memory alone (tmpfs, ramfs), and gone with the next boot."""
    return file_system(fd) in (_TMPFS, _RAMFS)


def _owner_of_new(folder: int) -> int:
    """The owner of a file that we make in an open folder; the file is removed again."""
    flags = os.O_WRONLY | os.O_CLOEXEC
    try:
        fd = os.open(".", flags | os.O_TMPFILE, 0o600, dir_fd=folder)
    except OSError:  # a file system where a file must have a name
        name = f".{secrets.token_hex(8)}"
        fd = os.open(name, flags | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder)
        os.unlink(name, dir_fd=folder)
    try:
        return os.fstat(fd).st_uid
    finally:
        os.close(fd)


def read_file(name: str, dir_fd: int, limit: int) -> bytes:
    """A regular file's content.

    Raises:
        OSError: as ``open_file``; EFBIG where it is longer than ``limit`` bytes.
    """
    fd = open_file(name, dir_fd)
    try:
        if os.fstat(fd).st_size > limit:
            raise OSError(errno.EFBIG, f"longer than {limit} bytes", name)
        parts = []
        left = limit + 1  # it may grow while it is read
        while left and (part := os.read(fd, min(left, 1 << 20))):
            parts.append(part)
            left -= len(part)
        if not left:
            raise OSError(errno.EFBIG, f"longer than {limit} bytes", name)
        return b"".join(parts)
    finally:
        os.close(fd)


def remove_tree(name: str, dir_fd: int, files: Files, *, depth: int = 8) -> int:
    """Remove a folder and all in it, never following a symlink; gone already is fine.

    Args:
        name: of the folder, one component.
        dir_fd: the folder it is in.
        files: does the removing.
        depth: how deep folders may be nested.

    Returns:
        Bytes that its files had.
    """
    if depth == 0:
        raise OSError(errno.ELOOP, "folders nested too deep", name)
    try:
        fd = open_folder(name, dir_fd)
    except FileNotFoundError:
        return 0
    try:
        freed = clear_folder(fd, files, depth=depth)
    finally:
        os.close(fd)
    try:
        files.rmdir(name, dir_fd)
    except FileNotFoundError:
        pass
    return freed


def clear_folder(fd: int, files: Files, *, depth: int = 8) -> int:
    """Remove all that is in an open folder, as ``remove_tree`` does; returns the bytes."""
    freed = 0
    for entry in os.listdir(fd):
        try:
            info = os.stat(entry, dir_fd=fd, follow_symlinks=False)
            if stat.S_ISDIR(info.st_mode):
                freed += remove_tree(entry, fd, files, depth=depth - 1)
            else:
                files.unlink(entry, fd)
                freed += info.st_size
        except FileNotFoundError:  # somebody else cleans up too
            continue
    return freed


def no_more_files(error: BaseException) -> bool:
    """Whether it is, or came of, that this process can open no file more: when it is run again it may."""
    cause = error if isinstance(error, OSError) else error.__cause__
    return isinstance(cause, OSError) and cause.errno in (errno.EMFILE, errno.ENFILE)


@contextmanager
def typed_errors(what: str) -> Iterator[None]:
    """Turn the OSErrors that have a meaning to users into ours; others pass.

    Raises:
        NoRoomOnHost: no room or no quota.
        PermissionDenied: not permitted, or read-only.
        UsageError: no file can have such a name.
    """
    try:
        yield
    except OSError as e:
        typed = _typed(e, what)
        if typed is None:
            raise
        raise typed from e


def _typed(e: OSError, what: str) -> LimosaError | None:
    if e.errno in (errno.ENOSPC, errno.EDQUOT):
        return NoRoomOnHost(detail=f"{what}: {e.strerror}")
    if e.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        where = f" ({e.filename})" if e.filename else ""
        return PermissionDenied(detail=f"{what}: {e.strerror}{where}")
    if e.errno in (errno.ENAMETOOLONG, errno.ELOOP):
        return UsageError(detail=f"{what if len(what) < 300 else what[:300] + '…'}: {e.strerror}")
    return None


def copy_sparse(
    source: int, target: int, stop: Callable[[], None] = lambda: None, *, begin: int = 0, at: int = 0
) -> None:
    """Copy one open file's content into another; holes stay holes (lseek(2), SEEK_DATA).

    Args:
        source: open for reading; its position is changed.
        target: open for writing; nothing is behind ``at``. It has its size last: before that it is not whole.
        stop: called every 64 MiB: raises what ends it.
        begin: where to begin in the source.
        at: where that goes.
    """
    size = os.fstat(source).st_size
    end = begin
    while end < size:
        try:
            start = os.lseek(source, end, os.SEEK_DATA)
        except OSError as e:
            if e.errno == errno.ENXIO:  # nothing but a hole
                break
            raise
        end = min(size, os.lseek(source, start, os.SEEK_HOLE))
        os.lseek(target, at + start - begin, os.SEEK_SET)
        while start < end:
            stop()
            done = os.sendfile(target, source, start, min(end - start, 64 << 20))
            if not done:
                break  # it became shorter
            start += done
    os.ftruncate(target, at + size - begin)
