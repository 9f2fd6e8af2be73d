"""Opening an image: once, by descriptors, its hash before its text."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from types import TracebackType

from limosa.errors import DamagedImage, NoSuchImage, NotAnImage, PermissionDenied, UnfinishedImage
from limosa.image import trust as trust_rules
from limosa.image.chunks import CHUNKS_NAME
from limosa.image.files import FOLDER_MODE, open_folder, read_file
from limosa.image.manifest import (
    CRIU_NAME,
    DIGEST_NAME,
    LOG_NAME,
    MANIFEST_LIMIT,
    MANIFEST_NAME,
    Manifest,
    decode,
)

MARKER_NAME = "unfinished.json"
"""The file that says whose an unfinished folder is; it goes after the rename, and means nothing in a whole image."""

_PARTIAL = re.compile(r"\.(.+)\.limosa-partial-[0-9a-f]{8,64}", re.DOTALL)


def is_partial_name(name: str) -> bool:
    """Whether a folder of this name is one that a checkpoint writes before its commit point."""
    return _PARTIAL.fullmatch(name) is not None


def partial_name(name: str, token: str) -> str:
    """The temporary folder's name for an image called ``name`` (or for another temporary folder of it).

    A long one is cut to stay within the 255 bytes that a name may have.
    """
    if known := _PARTIAL.fullmatch(name):
        name = known[1]
    room = 255 - len(f"..limosa-partial-{token}")
    raw = os.fsencode(name)
    short = raw[:room].decode("utf-8", "ignore") if len(raw) > room else name
    return f".{short}.limosa-partial-{token}"


class Image:
    """An open image; a context manager that closes it.

    Attributes:
        path: as it was asked for, made absolute.
        fd: of its folder, the one and only time it was looked up by a path.
        criu_fd: of ``criu/``; what CRIU is handed.
        chunks_fd: of ``chunks/``, -1 where the image has no device memory there.
        id: BLAKE3 of the manifest's bytes, 64 hexadecimal digits.
        manifest: what it says.
    """

    def __init__(
        self,
        path: Path,
        fd: int,
        criu_fd: int,
        id: str,  # noqa: A002 (its name to users)
        manifest: Manifest,
        chunks_fd: int = -1,
    ):
        self.path = path
        self.fd = fd
        self.criu_fd = criu_fd
        self.chunks_fd = chunks_fd
        self.id = id
        self.manifest = manifest

    def __enter__(self) -> Image:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Image({str(self.path)!r}, id={self.id[:12]!r})"

    def close(self) -> None:
        """Close the descriptors; a second time does nothing."""
        for name in ("chunks_fd", "criu_fd", "fd"):
            fd: int = getattr(self, name)
            setattr(self, name, -1)
            if fd >= 0:
                os.close(fd)

    def open_log(self) -> int:
        """A descriptor of ``log/`` (CRIU's work folder), made if it is not there; the caller closes it.

        Raises:
            OSError: it cannot be made (a read-only medium), or is no folder.
        """
        try:
            os.mkdir(LOG_NAME, FOLDER_MODE, dir_fd=self.fd)
        except FileExistsError:
            pass
        return open_folder(LOG_NAME, self.fd)


def open_image(path: str | os.PathLike[str], *, trust: bool = True) -> Image:
    """Open an image and read its manifest; its other files are ``verify``'s business.

    Args:
        path: of its folder; symlinks on the way are followed with care (see ``limosa.image.trust``).
        trust: refuse what somebody else could have written. False only for looking (``inspect``, ``verify``, ``rm``).

    Raises:
        UntrustedImage: see ``trust``.
        NoSuchImage: there is nothing at ``path``.
        NotAnImage: nothing of what is there is an image's.
        UnfinishedImage: a checkpoint that never reached its end left it.
        DamagedImage: it is no image, or its manifest is not the one that was committed.
        PermissionDenied: it may not be read.
    """
    absolute = Path(os.path.abspath(path))
    trusted = trust_rules.trusted_uids() if trust else None
    try:
        fd = trust_rules.open_path(path, trusted)
    except OSError as e:
        raise _explained(e, absolute, "the folder") from e
    try:
        name = os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))
        if is_partial_name(name) or (_exists(MARKER_NAME, fd) and not _exists(DIGEST_NAME, fd)):
            raise UnfinishedImage(path=absolute)
        if not any(_exists(part, fd) for part in (MANIFEST_NAME, DIGEST_NAME, CRIU_NAME)):
            what = "other things are in it" if os.listdir(fd) else "it is an empty folder"
            raise NotAnImage(path=absolute, detail=what)
        try:
            if trusted is not None:
                trust_rules.check_parts(fd, absolute, trusted)
        except OSError as e:
            raise _explained(e, absolute, "a folder in it") from e
        manifest, digest = _read_manifest(fd, absolute)
        try:
            criu_fd = open_folder(CRIU_NAME, fd)
        except OSError as e:
            raise _explained(e, absolute, f"{CRIU_NAME}/") from e
        try:
            chunks_fd = open_folder(CHUNKS_NAME, fd) if manifest.device else -1
        except OSError as e:
            os.close(criu_fd)
            raise _explained(e, absolute, f"{CHUNKS_NAME}/") from e
        return Image(absolute, fd, criu_fd, digest, manifest, chunks_fd)
    except BaseException:
        os.close(fd)
        raise


def _read_manifest(fd: int, path: Path) -> tuple[Manifest, str]:
    contents = []
    for name, limit in ((MANIFEST_NAME, MANIFEST_LIMIT), (DIGEST_NAME, 1024)):
        try:
            contents.append(read_file(name, fd, limit))
        except OSError as e:
            raise _explained(e, path, name) from e
    return decode(contents[0], contents[1], path)


def _exists(name: str, dir_fd: int) -> bool:
    try:
        os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _explained(e: OSError, path: Path, what: str) -> Exception:
    """An OSError at opening a part as the error that users know."""
    if e.errno in (errno.EACCES, errno.EPERM):
        return PermissionDenied(detail=f"image {path}: {what} may not be read", hint="use sudo, or be its owner")
    if e.errno == errno.ENOENT:
        return NoSuchImage(path=path) if what == "the folder" else DamagedImage(path=path, detail=f"{what} is missing")
    if e.errno == errno.ENOTDIR and what == "the folder":
        return NotAnImage(path=path, detail="an image is a folder")
    if e.errno in (errno.ENOTDIR, errno.ELOOP, errno.EINVAL, errno.ENXIO):
        return DamagedImage(path=path, detail=f"{what} is not what it should be ({e.strerror})")
    return DamagedImage(path=path, detail=f"{what} cannot be read ({e.strerror})")
