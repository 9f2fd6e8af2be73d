"""``rm``: an image goes, or what an unfinished one left, and the nftables table that keeps its peers waiting."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterator

from limosa.errors import LimosaError, UsageError
from limosa.image import Image, open_image
from limosa.image.files import open_folder
from limosa.image.manifest import LOG_NAME
from limosa.image.remove import remove as remove_folder
from limosa.image.trust import trusted_uids
from limosa.operation import claims
from limosa.operation.leftovers import remove_table, tables_of
from limosa.process.criu.run import DUMP_LOG
from limosa.process.criu.stats import run_id
from limosa.process.identity import Identity

_SHORTEST = 8  # characters of a run's id that tell it from all others

_LONGEST = 4096  # PATH_MAX of Linux


def remove_image(path: str | os.PathLike[str], *, litter_only: bool = False) -> int:
    """Removes an image, or an unfinished folder, and the nftables table that its dump left; returns the bytes freed.

    ``litter_only``: not a whole image that somebody else may have given an unfinished folder's name.
    Raises UsageError (it is neither) and Busy (a living operation writes or reads it).
    """
    if len(os.fspath(path)) > _LONGEST:
        raise UsageError(detail=f"a path of {len(os.fspath(path))} characters is none")
    with _claimed(path):
        return _remove(path, litter_only)


@contextlib.contextmanager
def _claimed(path: str | os.PathLike[str]) -> Iterator[None]:
    """Keeps restores and checkpoints away meanwhile; Busy: one of them has it."""
    me = Identity.of(os.getpid())
    claim = claims.Claim(id=f"rm-{me.pid}-{time.time_ns():x}", operation="rm", holder=me, paths=[os.fspath(path)])
    try:
        claims.make(claim, past_dead=True)
    except UnicodeEncodeError:  # a name that is no text cannot be noted: nobody else has a claim on it either
        claims.refuse(claim, past_dead=True)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            raise
        claims.refuse(claim, past_dead=True)  # the disk is full: what rm is for
    try:
        yield
    finally:
        claim.release()


def _remove(path: str | os.PathLike[str], litter_only: bool) -> int:
    tables: set[str] = set()

    def look(fd: int) -> None:
        """Reads the tables from the very folder that is removed, not from one that takes its place for a moment."""
        with contextlib.suppress(LimosaError), open_image(path, trust=True) as image:
            if os.path.samestat(os.fstat(image.fd), os.fstat(fd)):
                tables.update(_table_of(image))
        # An unfinished or damaged one has no manifest to ask; CRIU's log names the run all the same.
        with log_folder(fd) as log_fd:
            tables.update(tables_of(log_fd) if log_fd >= 0 else ())

    freed = remove_folder(path, look=look, litter_only=litter_only)
    for table in tables - _in_use():
        remove_table(table)
    return freed


def _table_of(image: Image) -> set[str]:
    """The table that the dump of this very image has made: no other is removed, whatever a manifest says."""
    name = image.manifest.nft_table or ""
    try:
        run = run_id(image.criu_fd) or str(image.manifest.job.pid)  # before CRIU 4.2 the pid
    except (OSError, ValueError):
        return set()
    told = name.removeprefix("CRIU-")
    mine = len(told) >= _SHORTEST and run.startswith(told) if run != str(image.manifest.job.pid) else told == run
    return {name} if name.startswith("CRIU-") and mine else set()


def _is_own(log_fd: int) -> bool:
    """Whether nobody but root and the caller could have written CRIU's log."""
    try:
        log = os.stat(DUMP_LOG, dir_fd=log_fd, follow_symlinks=False)
    except OSError:
        return False
    return all(one.st_uid in trusted_uids() and not one.st_mode & 0o022 for one in (os.fstat(log_fd), log))


def _in_use() -> set[str]:
    """The tables of CRIU before 4.2, which are named by a pid, of jobs that are worked on now."""
    worked_on = [one.pid for claim in claims.everybodys(whole=True) for one in claim.pids]
    return {f"{family}CRIU-{pid}" for pid in worked_on for family in ("", "inet ")}


@contextlib.contextmanager
def log_folder(image_fd: int) -> Iterator[int]:
    """An open image's folder with CRIU's logs, open; -1 where there is none, or others could have written the log."""
    log_fd = -1
    try:
        with contextlib.suppress(OSError):
            log_fd = open_folder(LOG_NAME, image_fd)
        yield log_fd if log_fd >= 0 and _is_own(log_fd) else -1
    finally:
        if log_fd >= 0:
            os.close(log_fd)
