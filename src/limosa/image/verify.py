"""Whether every file of an image is what its manifest says, through the descriptors that a restore will use."""

from __future__ import annotations

import errno
import functools
import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import msgspec

from limosa.errors import CancelledUndone, DamagedImage
from limosa.image.chunks import CHUNKS_NAME, Chunks, chunk_path
from limosa.image.files import open_file, typed_errors
from limosa.image.hashing import Cancel, Stopped, files_at_once, hash_fd, threads_here
from limosa.image.manifest import CRIU_NAME, DIGEST_NAME, LOG_NAME, MANIFEST_NAME, ImageFile, is_pages
from limosa.image.read import MARKER_NAME, Image, open_image
from limosa.progress import Progress, ProgressFn, silent

_WHAT = "verifying the image"
_LOOKING = 4  # threads that look for chunks
_OURS = frozenset({MANIFEST_NAME, DIGEST_NAME, MARKER_NAME, CRIU_NAME, LOG_NAME})

Part = Literal["all", "pages", "rest"]
"""Pages of memory are nearly all that there is in ``criu/``, and nothing that CRIU goes by."""
Kind = Literal["damaged", "missing", "extra", "swapped", "truncated"]


class FileCheck(msgspec.Struct, frozen=True, kw_only=True):
    """What was found of one file that the manifest names.

    Attributes:
        path: ``criu/NAME``, or ``chunks/ab/HASH``.
        size: bytes that it should have.
        ok: whether it has the content that was committed.
    """

    path: str
    size: int
    ok: bool


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is wrong.

    Attributes:
        path: of the file, relative to the image.
        problem: "damaged" (other content, or no file), "missing", "extra" (not in the manifest), "swapped" (it has the
            content of another file which is wrong too), "truncated" (shorter than it was).
        text: a sentence.
    """

    path: str
    problem: Kind
    text: str


class VerifyResult(msgspec.Struct, frozen=True, kw_only=True):
    """The answer.

    Attributes:
        image: path of the image.
        id: of the image.
        ok: whether nothing is wrong.
        files: every file of the manifest.
        problems: what is wrong; empty where ``ok``.
        bytes: that were hashed.
        seconds: that it took.
    """

    image: Path
    id: str
    ok: bool
    files: list[FileCheck]
    problems: list[Problem]
    bytes: int
    seconds: float

    def check(self) -> None:
        """Do nothing if all is well.

        Raises:
            DamagedImage: naming what is wrong (the first five).
        """
        if self.ok:
            return
        detail = "; ".join(p.text for p in self.problems[:5])
        if len(self.problems) > 5:
            detail += f"; and {len(self.problems) - 5} more"
        raise DamagedImage(path=self.image, detail=detail)


class _Found(msgspec.Struct):
    """One file as it is: ``digest`` is None where its size alone says that it is wrong."""

    size: int = 0
    digest: str | None = None
    problem: Problem | None = None


def verify(
    image: Image | str | os.PathLike[str],
    progress: ProgressFn = silent,
    *,
    cancel: Cancel | None = None,
    threads: int | None = None,
    read_chunks: bool = True,
    part: Part = "all",
) -> VerifyResult:
    """Compare every file with the manifest.

    Args:
        image: open: its descriptors of ``criu/`` and ``chunks/`` are the ones that are used. Or its folder.
        progress: told of the step "verify" in bytes.
        cancel: looked at between parts of files.
        threads: for hashing; None for as many as there are processors, at most eight.
        read_chunks: False where whoever reads the chunks hashes them himself: they are only looked for, with their
            sizes.
        part: CRIU's pages of memory alone; or all but these, which are only looked for, with their sizes.

    Returns:
        What was found; damage is a result, never an exception (``VerifyResult.check`` makes it one).

    Raises:
        CancelledUndone: ``cancel`` was set.
        PermissionDenied: a file may not be read.
        DamagedImage: of a folder: not even its manifest can be read.
    """
    if not isinstance(image, Image):
        with open_image(image, trust=False) as opened:
            return verify(opened, progress, cancel=cancel, threads=threads, read_chunks=read_chunks, part=part)
    begin = time.monotonic()
    wanted = [f for f in image.manifest.files if part != "pages" or _is_pages(f)]
    chunks = image.manifest.chunk_sizes() if part != "pages" else {}
    read = sum(f.size for f in wanted if part != "rest" or not _is_pages(f))
    total, done = read + (sum(chunks.values()) if read_chunks else 0), 0
    lock = threading.Lock()

    def advance(count: int) -> None:
        nonlocal done
        with lock:
            done += count
            progress(Progress("verify", done, total))

    hasher = functools.partial(hash_fd, threads=threads, advance=advance, cancel=cancel)
    try:
        with typed_errors(_WHAT):
            found = _files(wanted, image.criu_fd, hasher, threads, cancel, read_pages=part != "rest")
            one = functools.partial(hash_fd, threads=1, advance=advance, cancel=cancel) if read_chunks else None
            wrong = _chunks(image, chunks, one, threads or threads_here(), cancel)
            extra = _extra(image, chunks) if part != "pages" else []
    except Stopped:
        raise CancelledUndone(what=_WHAT)
    _name_problems(wanted, found)
    problems = [f.problem for f in found.values() if f.problem is not None] + list(wrong.values()) + extra
    return VerifyResult(
        image=image.path,
        id=image.id,
        ok=not problems,
        files=[FileCheck(path=f.path, size=f.size, ok=found[f.path].problem is None) for f in wanted]
        + [FileCheck(path=chunk_path(name), size=size, ok=name not in wrong) for name, size in chunks.items()],
        problems=problems,
        bytes=done,
        seconds=time.monotonic() - begin,
    )


def _is_pages(file: ImageFile) -> bool:
    return is_pages(file.path.removeprefix(f"{CRIU_NAME}/"))


def _files(
    wanted: Sequence[ImageFile],
    criu_fd: int,
    hasher: Callable[[int], tuple[str, int]],
    threads: int | None,
    cancel: Cancel | None,
    *,
    read_pages: bool,
) -> dict[str, _Found]:
    """What each file of ``criu/`` is, the largest begun first."""
    sizes = {f.size for f in wanted}

    def look(file: ImageFile) -> _Found:
        if cancel is not None and cancel.is_set():
            raise Stopped
        if not read_pages and _is_pages(file):
            return _look(file, {file.size}, criu_fd, lambda fd: (file.blake3, os.fstat(fd).st_size))
        return _look(file, sizes, criu_fd, hasher)

    with ThreadPoolExecutor(files_at_once(threads), thread_name_prefix="limosa-verify") as pool:
        looks = {f.path: pool.submit(look, f) for f in sorted(wanted, key=lambda f: -f.size)}
        try:
            return {f.path: looks[f.path].result() for f in wanted}
        finally:
            for waits in looks.values():
                waits.cancel()


def _look(file: ImageFile, sizes: set[int], criu_fd: int, hasher: Callable[[int], tuple[str, int]]) -> _Found:
    """Open and hash one file, unless its size is no file's of this image."""
    try:
        fd = open_file(file.path.removeprefix(f"{CRIU_NAME}/"), criu_fd)
    except OSError as e:
        if e.errno in (errno.EACCES, errno.EPERM):
            raise
        if e.errno == errno.ENOENT:
            return _Found(problem=Problem(path=file.path, problem="missing", text=f"{file.path} is missing"))
        text = f"{file.path} is not a regular file that can be opened ({e.strerror})"
        return _Found(problem=Problem(path=file.path, problem="damaged", text=text))
    try:
        size = os.fstat(fd).st_size
        if size != file.size and size not in sizes:  # not this file, and no other file of the image either
            return _Found(size=size)
        digest, size = hasher(fd)
        return _Found(size=size, digest=digest)
    except OSError as e:
        text = f"{file.path} cannot be read ({e.strerror})"
        return _Found(problem=Problem(path=file.path, problem="damaged", text=text))
    finally:
        os.close(fd)


def _name_problems(wanted: list[ImageFile], found: dict[str, _Found]) -> None:
    """Say of each file that is not as it should be what has happened to it."""
    wrong = [f for f in wanted if found[f.path].problem is None and found[f.path].digest != f.blake3]
    wrong_paths = {f.path for f in wrong}
    by_digest: dict[str, list[str]] = {}
    for f in wanted:
        by_digest.setdefault(f.blake3, []).append(f.path)
    for f in wrong:
        have = found[f.path]
        others = by_digest.get(have.digest, []) if have.digest else []
        kind: Kind
        if others:
            other = next((path for path in others if path in wrong_paths), None)
            kind = "swapped" if other else "damaged"
            text = f"{f.path} has the content of {other or others[0]}"
        elif have.size < f.size:
            kind, text = "truncated", f"{f.path} has {have.size} bytes instead of {f.size}"
        elif have.size > f.size:
            kind, text = "damaged", f"{f.path} has {have.size} bytes instead of {f.size}"
        else:
            kind, text = "damaged", f"{f.path} has another content than was written"
        have.problem = Problem(path=f.path, problem=kind, text=text)


def _chunks(
    image: Image,
    wanted: dict[str, int],
    hasher: Callable[[int], tuple[str, int]] | None,
    threads: int,
    cancel: Cancel | None,
) -> dict[str, Problem]:
    """What is wrong with chunks, by name; without a hasher only whether they are there, with their sizes."""
    if not wanted:
        return {}
    names = list(wanted)
    # To look takes microseconds, and many threads would wait for each other; or a millisecond over a network.
    parts = [[name] for name in names] if hasher is not None else [names[n::_LOOKING] for n in range(_LOOKING)]

    def look(part: list[str]) -> dict[str, Problem | None]:
        found: dict[str, Problem | None] = {}
        for name in part:
            if cancel is not None and cancel.is_set():
                raise Stopped
            found[name] = _chunk(chunks, name, wanted[name], wanted, hasher)
        return found

    with Chunks(image.chunks_fd) as chunks, ThreadPoolExecutor(threads, thread_name_prefix="limosa-verify") as pool:
        looks = [pool.submit(look, part) for part in parts]
        try:
            found = {name: problem for one in looks for name, problem in one.result().items()}
        finally:
            for one in looks:
                one.cancel()
    return {name: problem for name in names if (problem := found[name]) is not None}


def _chunk(
    chunks: Chunks, name: str, size: int, wanted: dict[str, int], hasher: Callable[[int], tuple[str, int]] | None
) -> Problem | None:
    path = chunk_path(name)
    try:
        fd = chunks.open(name)
    except OSError as e:
        if e.errno in (errno.EACCES, errno.EPERM):
            raise
        if e.errno == errno.ENOENT:
            return Problem(path=path, problem="missing", text=f"{path} is missing")
        return Problem(
            path=path, problem="damaged", text=f"{path} is not a regular file that can be opened ({e.strerror})"
        )
    try:
        have = os.fstat(fd).st_size
        if have != size:
            kind: Kind = "truncated" if have < size else "damaged"
            return Problem(path=path, problem=kind, text=f"{path} has {have} bytes instead of {size}")
        digest = hasher(fd)[0] if hasher is not None else name
    except OSError as e:
        return Problem(path=path, problem="damaged", text=f"{path} cannot be read ({e.strerror})")
    finally:
        os.close(fd)
    if digest == name:
        return None
    if digest in wanted:
        return Problem(path=path, problem="swapped", text=f"{path} has the content of {chunk_path(digest)}")
    return Problem(path=path, problem="damaged", text=f"{path} has another content than was written")


def _extra(image: Image, chunks: Collection[str]) -> list[Problem]:
    """What is in the folder and not in the manifest."""
    known = {f.path for f in image.manifest.files}
    ours = _OURS | {CHUNKS_NAME} if chunks else _OURS
    paths = [name for name in sorted(os.listdir(image.fd)) if name not in ours]
    paths += [path for name in sorted(os.listdir(image.criu_fd)) if (path := f"{CRIU_NAME}/{name}") not in known]
    if chunks:
        with Chunks(image.chunks_fd) as folder:
            paths += folder.strangers(chunks)
    shown = [os.fsencode(path).decode("utf-8", "backslashreplace") for path in paths]
    return [Problem(path=path, problem="extra", text=f"{path} is not in the manifest") for path in shown]
