"""Removing an image, or what an unfinished checkpoint left; nothing else, and never through a symlink."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Callable
from pathlib import Path

from limosa.errors import Busy, FailedUndone, NoSuchImage, UsageError
from limosa.image.chunks import CHUNKS_NAME, is_chunk_folder
from limosa.image.files import Files, clear_folder, open_folder, typed_errors
from limosa.image.manifest import CRIU_NAME, DIGEST_NAME, LOG_NAME, MANIFEST_NAME
from limosa.image.read import MARKER_NAME, is_partial_name, partial_name
from limosa.image.trust import destination_problem, open_named
from limosa.image.unfinished import describe, this_process

_FILES = frozenset({MANIFEST_NAME, DIGEST_NAME, MARKER_NAME})
_FOLDERS = frozenset({CRIU_NAME, LOG_NAME, CHUNKS_NAME})


def remove(
    path: str | os.PathLike[str],
    *,
    files: Files | None = None,
    look: Callable[[int], None] = lambda _: None,
    litter_only: bool = False,
) -> int:
    """Remove an image, damaged or not, or an unfinished folder.

    It is first renamed to a new unfinished folder's name: a crash on the way leaves litter that is recognised as such,
    never half an image under its own name, and whoever still writes the folder can no longer commit it.

    Args:
        path: of its folder, not of a symlink to it.
        files: how the disk is changed; for tests.
        look: is shown the open folder before anything goes.
        litter_only: refuse a whole image that somebody else may have given an unfinished folder's name.

    Returns:
        Bytes freed.

    Raises:
        NoSuchImage: there is nothing at ``path``.
        UsageError: it is no image: what it has in it is not what an image has.
        Busy: another living process is writing it.
        PermissionDenied: it may not be removed; for root, it is behind a link of another user's.
    """
    files = files or Files()
    absolute = Path(os.path.abspath(path))
    with typed_errors(f"removing {absolute}"):
        try:
            parent_fd = open_named(absolute.parent)
        except (FileNotFoundError, NotADirectoryError) as e:
            raise NoSuchImage(path=absolute) from e
        try:
            return _remove(absolute, parent_fd, files, look, litter_only)
        finally:
            os.close(parent_fd)


def _remove(path: Path, parent_fd: int, files: Files, look: Callable[[int], None], litter_only: bool) -> int:
    try:
        fd = open_folder(path.name, parent_fd)
    except FileNotFoundError as e:
        raise NoSuchImage(path=path) from e
    except OSError as e:
        if e.errno in (errno.ELOOP, errno.ENOTDIR):
            if (uid := _link_of(path.name, parent_fd)) is not None:
                detail = f"{path} is a symbolic link of uid {uid}'s: nothing was removed"
                raise UsageError(detail=detail, hint="name the image that it leads to, if that is meant") from e
            raise UsageError(detail=f"{path} is not an image's folder") from e
        raise
    try:
        name = path.name
        names = _known_names(fd, path)
        if is_partial_name(name) or MARKER_NAME in names:
            owner = describe(path, name, parent_fd)
            if owner is not None and owner.state == "alive" and owner.owner != this_process():
                pid = owner.owner.partition("@")[0]
                raise Busy(f"{path} is being written by process {pid}", pid=int(pid), by=owner.operation)
        elif not (CRIU_NAME in names and {MANIFEST_NAME, DIGEST_NAME} & names):
            raise UsageError(detail=f"{path} is not an image: it has no {CRIU_NAME}/ with a manifest")
        _refuse_renamed(path, names if litter_only else set())
        look(fd)
        # Renaming takes it from everybody else: a writer who is alive after all fails to commit it, and never commits
        # what is being removed.
        name = partial_name(name, secrets.token_hex(8))
        try:
            files.rename(path.name, name, parent_fd)
        except FileNotFoundError as e:
            raise NoSuchImage(path=path) from e
        if not os.path.samestat(os.stat(name, dir_fd=parent_fd, follow_symlinks=False), os.fstat(fd)):
            detail = "somebody has put something else in its place"
            try:
                files.rename_new(name, path.name, parent_fd)
            except OSError:  # and a third thing since
                detail += f", which is {path.parent / name} now"
            raise FailedUndone(what=f"removing {path}", detail=detail)
        files.fsync(parent_fd)
        freed = clear_folder(fd, files)
        try:
            files.rmdir(name, parent_fd)
        except FileNotFoundError:
            pass
        return freed
    finally:
        os.close(fd)


def _refuse_renamed(path: Path, names: set[str]) -> None:
    """Raises UsageError for a whole image that somebody else may have given an unfinished folder's name.

    What is unfinished and has a manifest with its hash has its marker as well: that goes after the rename that makes it
    an image.
    """
    why = destination_problem(path) if {MANIFEST_NAME, DIGEST_NAME} <= names and MARKER_NAME not in names else None
    if why is not None:
        detail = f"{path} is a whole image, which somebody may have given that name ({why}): it was left alone"
        raise UsageError(detail=detail, hint=f"limosa rm {path}, or give it its name back")


def _link_of(name: str, dir_fd: int) -> int | None:
    """The owner of a symbolic link; None if it is no link."""
    try:
        found = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return found.st_uid if stat.S_ISLNK(found.st_mode) else None


def _known_names(fd: int, path: Path) -> set[str]:
    """The names in an image's folder; UsageError if there is anything that no image has."""
    names = set(os.listdir(fd))
    for name in sorted(names):
        is_folder = stat.S_ISDIR(os.lstat(name, dir_fd=fd).st_mode)
        if name not in (_FOLDERS if is_folder else _FILES | _FOLDERS):
            raise UsageError(detail=f"{path} holds {name!r}, which is no part of an image: nothing was removed")
        if is_folder and (folder := _strange_folder(name, fd)):
            where = f"the folder {folder}"
            raise UsageError(detail=f"{path} holds {where}, which is no part of an image: nothing was removed")
    return names


def _strange_folder(name: str, dir_fd: int, shown: str = "") -> str:
    """A folder within the folder that no image has, or ""."""
    shown = shown or name
    inner = open_folder(name, dir_fd)
    try:
        for part in sorted(os.listdir(inner)):
            if not stat.S_ISDIR(os.lstat(part, dir_fd=inner).st_mode):
                continue
            if shown != CHUNKS_NAME or not is_chunk_folder(part):
                return f"{shown}/{part}"
            if found := _strange_folder(part, inner, f"{shown}/{part}"):
                return found
    finally:
        os.close(inner)
    return ""
