"""Writing an image: into a temporary sibling folder, put on disk, then renamed; the rename is the commit point.

The order of the writes, and what a crash after each of them leaves, stands in ``docs/image-format.md``; every line
there has a test (``tests/image/test_image_crash.py``). In short: until the rename there is a folder that its name and
its marker tell to be unfinished, which ``unfinished()`` lists and ``remove()`` removes; after it there is an image.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shlex
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

import msgspec

from limosa.errors import DestinationExists, FailedUndone, UsageError
from limosa.image.chunks import CHUNKS_NAME
from limosa.image.files import Files, clear_folder, copy_sparse, open_folder, remove_tree, typed_errors
from limosa.image.following import Begun, Following
from limosa.image.hashing import Cancel
from limosa.image.manifest import (
    CRIU_NAME,
    DIGEST_NAME,
    LOG_NAME,
    MANIFEST_NAME,
    ImageFile,
    Manifest,
    digest_line,
    digest_of,
    encode,
)
from limosa.image.read import MARKER_NAME, Image, partial_name
from limosa.image.sync import WHAT, CommitTimings, hash_and_sync, secure_files, stop_if, sync_chunks
from limosa.image.trust import open_named
from limosa.image.unfinished import Marker, this_process, write_marker
from limosa.progress import ProgressFn, silent


class Draft:
    """An image being written; a context manager that discards what was not committed.

    Attributes:
        dest: where the image will be.
        path: the temporary folder; ``dest`` once committed.
        fd, criu_fd, log_fd: descriptors of it, of ``criu/`` (CRIU's images) and of ``log/`` (CRIU's work folder; its
            log and ``stats-dump`` belong there, they are written after the commit and are not hashed).
        chunks_fd: of ``chunks/``, once :meth:`make_chunks` was called; -1 before.
        committed: whether the commit point has been passed.
        timings: of the commit, zeroes before.
    """

    def __init__(self, dest: Path, name: str, parent_fd: int, files: Files):
        self.dest = dest
        self.path = dest.parent / name
        self.committed = False
        self.timings = CommitTimings()
        self.fd = self.criu_fd = self.log_fd = self.chunks_fd = -1
        self._name = name
        self._id = ""
        self._following: Following | None = None
        self._parent_fd = parent_fd
        self._files = files

    @classmethod
    def create(
        cls, dest: str | os.PathLike[str], *, operation: str = "", owner: str = "", files: Files | None = None
    ) -> Draft:
        """Make the temporary folder beside ``dest``.

        Args:
            dest: the image's folder; must not exist, or be an empty folder.
            operation: the operation's id, kept in the marker.
            owner: identity (``pid@start_time``) of the process whose death makes the folder litter; "" for this one.
            files: how the disk is changed; for tests.

        Raises:
            DestinationExists: ``dest`` is there already, and is no empty folder.
            UsageError: the folder it is to be in does not exist, or ``dest`` is a mount point.
            PermissionDenied, NoRoomOnHost: it cannot be made; for root, it is behind a link of another user's.
        """
        files = files or Files()
        path = Path(os.path.abspath(dest))
        try:
            parent_fd = open_named(path.parent)
        except (FileNotFoundError, NotADirectoryError) as e:
            raise missing_parent(path.parent) from e
        except PermissionError as e:
            with typed_errors(WHAT):
                raise e
        token = secrets.token_hex(8)
        draft = cls(path, partial_name(path.name, token), parent_fd, files)
        try:
            _check_free(path, parent_fd)
            with typed_errors(WHAT):
                draft.fd = files.mkdir(draft._name, parent_fd)
                write_marker(
                    draft.fd,
                    files,
                    Marker(dest=os.fsencode(path).hex(), operation=operation, owner=owner or this_process()),
                )
                draft.criu_fd = files.mkdir(CRIU_NAME, draft.fd)
                draft.log_fd = files.mkdir(LOG_NAME, draft.fd)
        except BaseException:
            try:
                draft.discard()
            except OSError:  # what is left is recognised as unfinished; the first error is the one that counts
                pass
            raise
        return draft

    def __enter__(self) -> Draft:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, trace: TracebackType | None) -> None:
        if not self.committed:
            self.discard()
        self.close()

    def make_chunks(self) -> int:
        """Make ``chunks/``, for device memory; returns its descriptor, which stays ours.

        Raises:
            PermissionDenied, NoRoomOnHost: it cannot be made.
        """
        if self.chunks_fd < 0:
            with typed_errors(WHAT):
                self.chunks_fd = self._files.mkdir(CHUNKS_NAME, self.fd)
        return self.chunks_fd

    def drop_chunks(self) -> None:
        """Remove ``chunks/`` again: device memory goes into the image in another way.

        Raises:
            OSError: it could not be removed.
        """
        if self.chunks_fd >= 0:
            os.close(self.chunks_fd)
            self.chunks_fd = -1
            remove_tree(CHUNKS_NAME, self.fd, self._files)

    def put_in(self, name: str, source: int, stop: Callable[[], None] = lambda: None) -> None:
        """Copy what is in an open file into ``criu/``, under a name that CRIU has none of.

        Raises:
            NoRoomOnHost, PermissionDenied, OSError: the disk said no.
        """
        with typed_errors(WHAT):
            target = self._files.make(name, self.criu_fd)
            try:
                copy_sparse(source, target, stop)
            finally:
                os.close(target)

    def follow(self) -> None:
        """Begin to hash what CRIU writes, beside it, until :meth:`followed`. It is no error if that cannot be."""
        self._forget_followed()
        with contextlib.suppress(RuntimeError, OSError, MemoryError):
            self._following = Following(self.criu_fd)

    def followed(self) -> None:
        """CRIU has ended: what was hashed is kept for the commit."""
        if self._following is not None:
            self._following.stop()

    def _forget_followed(self) -> None:
        following, self._following = self._following, None
        if following is not None:
            following.close()

    def empty_criu(self) -> None:
        """Remove what a dump that failed has left in ``criu/``: the next one is another.

        Raises:
            OSError: it could not be removed.
        """
        self._forget_followed()
        for name in os.listdir(self.criu_fd):
            self._files.unlink(name, self.criu_fd)

    def commit(
        self,
        manifest: Manifest,
        progress: ProgressFn = silent,
        *,
        cancel: Cancel | None = None,
        threads: int | None = None,
    ) -> Image:
        """``prepare`` and ``publish``: after it the image is there, whole and on disk.

        CRIU may still be running with its log open in ``log/`` (its ``post-dump`` action), done with ``criu/``.

        Args:
            manifest: all but ``files``, which is filled in here.
            progress: told of the step "hash" in bytes.
            cancel: looked at until the commit point.
            threads: for hashing; None for as many as there are processors, at most eight.

        Returns:
            The image, open.

        Raises:
            CancelledUndone: ``cancel`` was set; the draft is still there to be discarded.
            DestinationExists: somebody put something at ``dest`` meanwhile.
            NoRoomOnHost, PermissionDenied, OSError: the disk said no. Nothing is committed, unless:
            FailedUndone: with ``fields["image"]``: renamed, but the parent folder could not be put on disk.
        """
        begin = time.monotonic()
        self.prepare(manifest, progress, cancel=cancel, threads=threads)
        image = self.publish()
        self.timings = msgspec.structs.replace(self.timings, total=time.monotonic() - begin)
        return image

    def prepare(
        self,
        manifest: Manifest,
        progress: ProgressFn = silent,
        *,
        cancel: Cancel | None = None,
        threads: int | None = None,
    ) -> None:
        """Everything before the commit point: hash and sync ``criu/``, sync ``chunks/``, write the manifest, its hash.

        Chunks that the manifest does not name (memory that changed once more) are removed.

        Raises: as ``commit``, all with nothing committed.
        """
        with typed_errors(WHAT):
            following, self._following = self._following, None  # its hashers are of use once
            try:
                begun = following.stop() if following is not None else {}
                files = self._hash(manifest, progress, cancel, threads, begun)
            finally:
                if following is not None:
                    following.close()
            self._manifest = msgspec.structs.replace(manifest, files=files)
            try:
                data = encode(self._manifest)
            except ValueError as e:
                raise FailedUndone(what=WHAT, detail=f"its manifest could not be read again: {e}") from e
            self._id = digest_of(data)
            self._files.write(MANIFEST_NAME, data, self.fd)
            self._files.write(DIGEST_NAME, digest_line(self._id), self.fd)
            secure_files(self.log_fd, self._files)
            self._files.fsync(self.fd)
            stop_if(cancel)

    def _hash(
        self,
        manifest: Manifest,
        progress: ProgressFn,
        cancel: Cancel | None,
        threads: int | None,
        begun: Mapping[str, Begun],
    ) -> list[ImageFile]:
        with ThreadPoolExecutor(1, thread_name_prefix="limosa-chunks") as beside:
            chunks = beside.submit(self._sync_chunks, manifest, cancel)
            files, self.timings = hash_and_sync(
                self.criu_fd, self._files, progress, cancel=cancel, threads=threads, begun=begun
            )
            self._files.fsync(self.criu_fd)
            chunks.result()
        return files

    def _sync_chunks(self, manifest: Manifest, cancel: Cancel | None) -> None:
        if self.chunks_fd >= 0:
            sync_chunks(self.chunks_fd, manifest.chunk_sizes(), self._files, cancel=cancel)

    @property
    def id(self) -> str:
        """The image's id once prepared, "" before."""
        return self._id

    def publish(self) -> Image:
        """The commit point: rename to ``dest`` and put that on disk.

        rename(2) replaces an empty folder and refuses (ENOTEMPTY, EEXIST, ENOTDIR) anything else, so no check
        comes between looking and doing.

        Raises: as ``commit``.
        """
        with typed_errors(WHAT):
            image = self._opened()  # before the rename, behind which nothing may fail for want of a descriptor
        try:
            self._rename()
        except BaseException:
            image.close()
            raise
        try:
            self._files.unlink(MARKER_NAME, self.fd)
        except OSError:  # it means nothing any more
            pass
        return image

    def _rename(self) -> None:
        with typed_errors(WHAT):
            try:
                self._files.rename(self._name, self.dest.name, self._parent_fd)
            except OSError as e:
                if e.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise _taken(self.dest) from e
                if e.errno == errno.ENOENT:
                    raise FailedUndone(what=WHAT, detail=f"somebody removed {self.path} while it was written") from e
                raise
        self._check_renamed()
        self.committed = True
        self.path = self.dest
        try:
            self._files.fsync(self._parent_fd)
        except OSError as e:
            detail = f"{self.dest.parent} could not be put on disk: {e.strerror}"
            raise FailedUndone(what=WHAT, detail=detail, image=str(self.dest)) from e

    def _opened(self) -> Image:
        """The image with descriptors of its own."""
        image = Image(self.dest, -1, -1, self._id, self._manifest)
        try:
            image.fd = os.dup(self.fd)
            image.criu_fd = os.dup(self.criu_fd)
            image.chunks_fd = os.dup(self.chunks_fd) if self._manifest.device else -1
        except OSError:
            image.close()
            raise
        return image

    def discard(self) -> int:
        """Remove the temporary folder, never following a symlink; after the commit point it does nothing.

        Returns:
            Bytes freed.

        Raises:
            OSError: it could not be removed; what is left is still recognised as unfinished.
        """
        try:
            if self.committed or self._parent_fd < 0:
                return 0
            self._forget_followed()
            freed = clear_folder(self.fd, self._files) if self.fd >= 0 else 0
            # By name, and an empty folder only: whatever stands there now, no more than that can be lost.
            try:
                self._files.rmdir(self._name, self._parent_fd)
            except FileNotFoundError:
                pass
            return freed
        finally:
            self.close()

    def secure_log(self) -> None:
        """Give what CRIU has put in ``log/`` since the commit (``stats-dump``, its log) mode 0600."""
        secure_files(self.log_fd, self._files)

    def close(self) -> None:
        """Close the descriptors; a second time does nothing."""
        self._forget_followed()
        for name in ("chunks_fd", "criu_fd", "log_fd", "fd", "_parent_fd"):
            fd = getattr(self, name)
            setattr(self, name, -1)
            if fd >= 0:
                os.close(fd)

    # --- inside ----------------------------------------------------------------------------------------------

    def _check_renamed(self) -> None:
        """That it was our folder which was renamed, not one that somebody put in its place."""
        there = os.stat(self.dest.name, dir_fd=self._parent_fd, follow_symlinks=False)
        ours = os.fstat(self.fd)
        if (there.st_dev, there.st_ino) != (ours.st_dev, ours.st_ino):
            raise FailedUndone(what=WHAT, detail=f"somebody else replaced {self.path} while it was written")


def free_bytes(dest: str | os.PathLike[str]) -> int:
    """Bytes that this user may still write where ``dest`` is to be (statvfs(3), f_bavail)."""
    info = os.statvfs(Path(os.path.abspath(dest)).parent)
    return info.f_bavail * info.f_frsize


def destination_taken(dest: Path) -> DestinationExists | None:
    """What is at ``dest`` already, in words; None where there is nothing, or an empty folder."""
    try:
        if dest.is_symlink():
            return DestinationExists(path=dest, what="is a symbolic link")
        if not dest.is_dir():
            return DestinationExists(path=dest, what="is a file already") if dest.exists() else None
        names = os.listdir(dest)
    except OSError as e:
        return DestinationExists(path=dest, what=f"exists already and cannot be looked into ({e.strerror})")
    if {MANIFEST_NAME, DIGEST_NAME} <= set(names):
        hint = f"name another folder, or remove it: limosa rm {dest}"
        return DestinationExists(path=dest, what="is an image already", hint=hint)
    if names:
        hint = f"name a folder that is not there yet, {dest / 'image'} say, or an empty one"
        return DestinationExists(path=dest, what="is a folder with things in it", hint=hint)
    return None


def missing_parent(parent: Path) -> UsageError:
    """There is no folder to put the image in: what is there instead, and what to type."""
    if os.path.lexists(parent):
        return UsageError(detail=f"{parent} is no folder to put the image in", hint="name another place")
    text = f"there is no folder {parent} to put the image in"
    return UsageError(detail=text, hint=f"mkdir -p {shlex.quote(str(parent))}")


def _taken(dest: Path) -> DestinationExists:
    """What is at ``dest``, where something is known to be, or to have been a moment ago."""
    return destination_taken(dest) or DestinationExists(path=dest, what="exists already")


def _check_free(dest: Path, parent_fd: int) -> None:
    """DestinationExists unless there is nothing, or an empty folder that a rename can replace."""
    if dest.name == "":
        raise _taken(dest)
    try:
        fd = open_folder(dest.name, parent_fd)
    except FileNotFoundError:
        return
    except OSError as e:  # a symlink, a file, a folder of somebody else's
        raise _taken(dest) from e
    try:
        if os.listdir(fd):
            raise _taken(dest)
        if _mount(fd) != _mount(parent_fd):
            raise UsageError(detail=f"{dest} is a mount point, which a rename cannot replace: name a folder in it")
    finally:
        os.close(fd)


def _mount(fd: int) -> str:
    """The id of the mount that an open folder is on (proc_pid_fdinfo(5))."""
    with open(f"/proc/self/fdinfo/{fd}", encoding="ascii") as f:
        return next((line for line in f if line.startswith("mnt_id:")), "")
