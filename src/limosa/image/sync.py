"""Hashing CRIU's files and putting them on disk, side by side."""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import MappingProxyType

import msgspec

from limosa.errors import CancelledUndone, FailedUndone
from limosa.image.chunks import Chunks, chunk_path
from limosa.image.files import FILE_MODE, FOLDER_MODE, Files, open_file, syncs_whole
from limosa.image.following import Begun
from limosa.image.hashing import Cancel, Stopped, files_at_once, hash_fd
from limosa.image.manifest import CRIU_NAME, ImageFile, is_file_name
from limosa.progress import Progress, ProgressFn

MANY = 500
"""From so many files on the whole file system is synced instead of each of them, where that is as good."""

WHAT = "writing the image"
"""What the errors of writing say has failed."""


class CommitTimings(msgspec.Struct, frozen=True, kw_only=True):
    """How long a commit took, in seconds; hashing and syncing run side by side.

    Attributes:
        hash: from the first byte hashed to the last.
        sync: during which fsync was under way for files of ``criu/`` (its own thread's time).
        total: all of the commit.
        bytes: that were hashed and synced.
    """

    hash: float = 0.0
    sync: float = 0.0
    total: float = 0.0
    bytes: int = 0


def hash_and_sync(
    criu_fd: int,
    files: Files,
    progress: ProgressFn,
    *,
    cancel: Cancel | None = None,
    threads: int | None = None,
    begun: Mapping[str, Begun] = MappingProxyType({}),
) -> tuple[list[ImageFile], CommitTimings]:
    """Hash every file of ``criu/`` while other threads give it mode 0600 and fsync it.

    Args:
        criu_fd: the open folder.
        files: how the disk is changed.
        progress: told of the step "hash" in bytes.
        cancel: looked at between parts of files.
        threads: for hashing; None for as many as there are processors, at most eight.
        begun: what of them is hashed already.

    Returns:
        What the manifest is to say of them, in the order of their names; and how long it took (``total`` left 0).

    Raises:
        CancelledUndone: ``cancel`` was set.
        FailedUndone: there is nothing there, or something that CRIU does not write.
        OSError: the disk said no.
    """
    sizes = _sizes(criu_fd)
    total, done = sum(sizes.values()), 0
    at_once = len(sizes) > MANY and syncs_whole(criu_fd)
    lock = threading.Lock()

    def advance(count: int) -> None:
        nonlocal done
        with lock:
            done += count
            progress(Progress("hash", done, total))

    def hashed(name: str) -> ImageFile:
        stop_if(cancel)
        fd = open_file(name, criu_fd)
        try:
            some = begun.get(name)
            already = (some.done, some.hasher) if some is not None and some.part_of(fd) else None
            digest, size = hash_fd(fd, threads=threads, advance=advance, cancel=cancel, begun=already)
        finally:
            os.close(fd)
        return ImageFile(path=f"{CRIU_NAME}/{name}", size=size, blake3=digest)

    hashes: dict[str, Future[ImageFile]] = {}
    with (
        ThreadPoolExecutor(8, thread_name_prefix="limosa-fsync") as pool,
        ThreadPoolExecutor(files_at_once(threads), thread_name_prefix="limosa-hash") as hashing,
    ):
        # The largest first, for it takes longest; the small ones side by side, for the journal's sake.
        by_size = sorted(sizes, key=lambda name: -sizes[name])
        if at_once:
            syncs = [pool.submit(_sync_all, criu_fd, files)]
        else:
            syncs = [pool.submit(_sync, name, criu_fd, files) for name in by_size]
        try:
            begin = time.monotonic()
            hashes = {name: hashing.submit(hashed, name) for name in by_size}
            result = [hashes[name].result() for name in sizes]
            taken = time.monotonic() - begin
            spans = [sync.result() for sync in syncs]
        except Stopped:
            raise CancelledUndone(what=WHAT)
        finally:
            for sync in syncs:
                sync.cancel()
            for one in hashes.values():
                one.cancel()
    return result, CommitTimings(hash=taken, sync=_covered(spans), bytes=total)


def sync_chunks(
    chunks_fd: int, wanted: Mapping[str, int], files: Files, *, cancel: Cancel | None = None, threads: int = 8
) -> None:
    """Put all chunks and the folders that they are in on disk; their names say what is in them, so nothing is hashed.

    Args:
        chunks_fd: the open folder ``chunks/``.
        wanted: the chunks that the manifest names, and their bytes; all others are removed.
        files: how the disk is changed.
        cancel: looked at between files.
        threads: how many at once.

    Raises:
        CancelledUndone: ``cancel`` was set.
        FailedUndone: a chunk is missing, or has another size.
        OSError: the disk said no.
    """
    with Chunks(chunks_fd, files) as chunks:
        chunks.keep(wanted)
        at_once = len(wanted) > MANY and syncs_whole(chunks_fd)

        def sync(name: str) -> None:
            stop_if(cancel)
            try:
                fd = chunks.open(name)
            except FileNotFoundError:
                raise FailedUndone(what=WHAT, detail=f"{chunk_path(name)} is missing") from None
            try:
                if os.fstat(fd).st_size != wanted[name]:
                    raise FailedUndone(what=WHAT, detail=f"{chunk_path(name)} has not {wanted[name]} bytes")
                if not at_once:
                    files.fsync(fd)
            finally:
                os.close(fd)

        if at_once:
            for name in wanted:
                sync(name)
            files.syncfs(chunks_fd)
            return
        with ThreadPoolExecutor(threads, thread_name_prefix="limosa-fsync") as pool:
            for done in [pool.submit(sync, name) for name in wanted]:
                done.result()
        for folder in chunks.folders():
            files.fsync(folder)


def secure_files(folder_fd: int, files: Files) -> None:
    """Mode 0600 for the files of a folder that CRIU writes to, 0700 for the folder."""
    for name in os.listdir(folder_fd):
        try:
            fd = open_file(name, folder_fd)
        except OSError:  # gone again, or no file: a log is not worth failing for
            continue
        try:
            if stat.S_IMODE(os.fstat(fd).st_mode) != FILE_MODE:
                files.chmod(fd, FILE_MODE)
        finally:
            os.close(fd)
    if stat.S_IMODE(os.fstat(folder_fd).st_mode) != FOLDER_MODE:
        files.chmod(folder_fd, FOLDER_MODE)


def stop_if(cancel: Cancel | None) -> None:
    """CancelledUndone if ``cancel`` is set."""
    if cancel is not None and cancel.is_set():
        raise CancelledUndone(what=WHAT)


def _sizes(criu_fd: int) -> dict[str, int]:
    """The files CRIU wrote, in the order of their names, with their bytes."""
    sizes = {}
    for name in sorted(os.listdir(criu_fd)):
        info = os.stat(name, dir_fd=criu_fd, follow_symlinks=False)
        if not stat.S_ISREG(info.st_mode) or not is_file_name(name):
            raise FailedUndone(what=WHAT, detail=f"{name!r} in {CRIU_NAME}/ is no file that CRIU writes")
        sizes[name] = info.st_size
    if not sizes:
        raise FailedUndone(what=WHAT, detail=f"{CRIU_NAME}/ is empty")
    return sizes


def _sync(name: str, criu_fd: int, files: Files) -> tuple[float, float]:
    """Mode and content of one file on disk; when it began and ended."""
    fd = open_file(name, criu_fd)
    try:
        begin = time.monotonic()
        if stat.S_IMODE(os.fstat(fd).st_mode) != FILE_MODE:
            files.chmod(fd, FILE_MODE)
        files.fsync(fd)
        return begin, time.monotonic()
    finally:
        os.close(fd)


def _sync_all(criu_fd: int, files: Files) -> tuple[float, float]:
    """The same for all files at once: 40,000 small ones took 13 s one by one."""
    begin = time.monotonic()
    for name in os.listdir(criu_fd):
        if stat.S_IMODE(os.stat(name, dir_fd=criu_fd, follow_symlinks=False).st_mode) != FILE_MODE:
            fd = open_file(name, criu_fd)
            try:
                files.chmod(fd, FILE_MODE)
            finally:
                os.close(fd)
    files.syncfs(criu_fd)
    return begin, time.monotonic()


def _covered(spans: list[tuple[float, float]]) -> float:
    """Seconds that are within at least one of the spans."""
    covered, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        covered += max(0.0, end - max(begin, until))
        until = max(until, end)
    return covered
