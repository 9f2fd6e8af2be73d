"""Whether anybody else could have written an image, or could swap it for another while it is used.

Whoever can write an image can run code as whoever restores it: CRIU makes processes from it. So root is refused an
image unless root or the user who called ``sudo`` (SUDO_UID) made it, and any other user unless he or root did. These
are the *trusted* users below.

The argument, which ``docs/image-format.md`` repeats for users:

1. The path is walked one component at a time from ``/``, each opened relative to the one before without following
   symlinks; a symlink is read and its target walked the same way. What is checked is therefore what is used: the
   descriptor at the end of the walk is the image, and no path is looked up a second time.
2. Every folder on the way must be owned by a trusted user (an owner can always write, or make it writable) and not be
   writable to group or others; then only trusted users can put, take or rename what is in it.
3. The exception is a sticky folder (``/tmp``, 1777): others may add names to it, but rename and remove only what they
   own (rename(2), unlink(2): EPERM/EACCES), and it is itself owned by a trusted user. So a component in it that is
   owned by a trusted user was put there by one and stays. That is what rule 2 asks of the next component
   anyway, so nothing more has to be checked. The same goes for a symlink in it: its owner wrote its target.
4. An access list that lets a named user write shows as the group's write bit in the mode (acl(5): the mask), so
   rule 2 covers it.
5. A file system that a user serves himself (FUSE with ``allow_other``) can claim any owner and mode; its mount names
   the user (``user_id=`` in ``/proc/self/mountinfo``), who must be a trusted one. The kernel says of the open component
   that it is FUSE, and only then are the mounts looked at: one that came, or went, during the walk is noticed.
6. The image's folder and everything in it are owned by trusted users, not writable to group or others (sticky or not)
   and neither symlinks nor anything but files and folders. Then what was verified is what CRIU reads.

What this cannot see: a trusted user who made an untrusted one's folder his own (``chown -R``), and descriptors opened
for writing before that.
"""

from __future__ import annotations

import errno
import os
import stat
from collections import deque
from pathlib import Path

from limosa.errors import DamagedImage, PermissionDenied, UntrustedImage
from limosa.image.files import open_folder
from limosa.start import file_system, installer, server_of, sudo_user

_MOST_LINKS = 40
_DEPTH = 3  # chunks/ab/ab…
_PROC = 0x9FA0  # statfs(2)
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def trusted_uids() -> frozenset[int]:
    """The users whose images are trusted: root, the caller, and for root the user who called ``sudo``."""
    return frozenset({0, os.geteuid(), sudo_user()})


def open_named(path: str | os.PathLike[str]) -> int:
    """Open a folder in which something is to be made or removed. For root no link of another user leads there.

    The owners of the folders on the way do not matter: the result is what the path names.

    Raises:
        PermissionDenied: there is such a link, or another user serves the file system (FUSE).
        OSError: ENOENT, ENOTDIR, EACCES, ELOOP … as open(2).
    """
    if os.geteuid() != 0:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    shown = os.fspath(path)
    try:
        fd = open_path(path, None, links=trusted_uids() | {installer()})
    except UntrustedImage as e:
        detail = f"{shown} is behind a symbolic link of another user's: {e.fields['detail']}"
        raise PermissionDenied(detail=detail, hint="name the folder that it leads to") from e
    try:
        server = server_of(fd)
        if server not in trusted_uids():
            raise PermissionDenied(detail=f"{shown} lies on {_served(server)}", hint="choose another")
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_path(
    path: str | os.PathLike[str], trusted: frozenset[int] | None, *, links: frozenset[int] | None = None
) -> int:
    """Open a folder component by component; see the module's text.

    Args:
        path: relative ones start at the working folder, which is walked from ``/`` too.
        trusted: user ids, or None to check nothing.
        links: user ids whose links are followed where ``trusted`` is None; None: everybody's.

    Returns:
        A descriptor of the folder, opened for reading; the caller closes it.

    Raises:
        UntrustedImage: somebody else could have written what stands at ``path``.
        OSError: ENOENT, ENOTDIR, EACCES, ELOOP … as open(2).
    """
    shown = os.fspath(path)
    text = shown if shown.startswith("/") else os.path.join(os.getcwd(), shown)
    pending = deque(_components(text))
    at = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    where, followed = "/", 0
    owners = links if trusted is None else trusted
    try:
        _check_folder(at, where, shown, trusted)
        while pending:
            name = pending.popleft()
            new = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
            info = os.fstat(new)
            if stat.S_ISLNK(info.st_mode):
                try:
                    followed += 1
                    if followed > _MOST_LINKS:
                        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), shown)
                    _check_owner(new, os.path.join(where, name), shown, owners)
                    # What /proc/PID/root says is "/", and it leads to another one: the kernel knows to which.
                    of_proc = file_system(new) == _PROC
                    target = "" if of_proc else os.readlink("", dir_fd=new)
                finally:
                    os.close(new)
                if not of_proc:
                    pending.extendleft(reversed(_components(target)))
                    if target.startswith("/"):
                        os.close(at)
                        at = -1
                        at, where = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC), "/"
                    continue
                new = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=at)
                info = os.fstat(new)
            os.close(at)
            at, where = new, os.path.join(where, name)
            if not stat.S_ISDIR(info.st_mode):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), shown)
            _check_folder(at, where, shown, trusted)
        return open_folder(".", at)
    finally:
        if at >= 0:
            os.close(at)


def check_parts(fd: int, path: str | os.PathLike[str], trusted: frozenset[int]) -> None:
    """Rule 6: the open image folder and all that is in it.

    Raises:
        UntrustedImage: a part is somebody else's, or others may write to it.
        DamagedImage: a part is neither a file nor a folder.
        OSError: a folder cannot be read.
    """
    shown = os.fspath(path)
    _check_part(os.fstat(fd), shown, shown, trusted)
    _check_within(fd, shown, shown, trusted, _DEPTH)


def doubt(image_fd: int, path: str | os.PathLike[str], *, parts: bool = True) -> str | None:
    """Why an image that was opened for looking only would not be restored, or None.

    Args:
        image_fd: its folder.
        path: by which it was opened.
        parts: whether all that is in it is looked at.
    """
    try:
        again = open_path(path, trusted_uids())
        try:
            if not os.path.samestat(os.fstat(again), os.fstat(image_fd)):
                return "another folder has taken its place"
        finally:
            os.close(again)
        if parts:
            check_parts(image_fd, path, trusted_uids())
        else:
            _check_part(os.fstat(image_fd), os.fspath(path), os.fspath(path), trusted_uids())
    except UntrustedImage as e:
        return str(e.fields["detail"])
    except (DamagedImage, OSError):  # is said by whoever reads it
        pass
    return None


def destination_problem(dest: str | os.PathLike[str]) -> str | None:
    """Why an image written to ``dest`` would be refused at restore, or None: something for ``plan`` to warn of.

    Raises:
        OSError: the folder that ``dest`` is to be in cannot be reached.
    """
    parent = Path(os.path.abspath(dest)).parent
    try:
        os.close(open_path(parent, trusted_uids()))
    except UntrustedImage as e:
        return str(e.fields["detail"])
    return None


# --- inside --------------------------------------------------------------------------------------------------


def _components(path: str) -> list[str]:
    """Names of a path, ``..`` among them (it is walked like any other), without the empty and ``.``."""
    return [part for part in path.split("/") if part not in ("", ".")]


def _check_folder(fd: int, where: str, shown: str, trusted: frozenset[int] | None) -> None:
    """Rules 2, 3 and 5 for a folder on the way."""
    if trusted is None:
        return
    _check_owner(fd, where, shown, trusted)
    info = os.fstat(fd)
    if info.st_mode & _OTHERS_WRITE and not info.st_mode & stat.S_ISVTX:
        raise _refused(
            shown, f"others may write to {where} (mode {stat.S_IMODE(info.st_mode):o})", f"chmod go-w {where}"
        )


def _check_owner(fd: int, where: str, shown: str, trusted: frozenset[int] | None) -> None:
    if trusted is None:
        return
    if (uid := os.fstat(fd).st_uid) not in trusted:
        raise _refused(shown, f"{where} belongs to user {uid}, not to {_names(trusted)}")
    if (server := server_of(fd)) not in {0, *trusted}:
        raise _refused(shown, f"{where} lies on {_served(server)}")


def _check_part(info: os.stat_result, where: str, shown: str, trusted: frozenset[int]) -> None:
    if info.st_uid not in trusted:
        raise _refused(shown, f"{where} belongs to user {info.st_uid}, not to {_names(trusted)}")
    if not (stat.S_ISREG(info.st_mode) or stat.S_ISDIR(info.st_mode)):  # CRIU would follow a symlink
        raise DamagedImage(path=shown, detail=f"{where} is neither a file nor a folder")
    if info.st_mode & _OTHERS_WRITE:
        mode = stat.S_IMODE(info.st_mode)
        raise _refused(shown, f"others may write to {where} (mode {mode:o})", f"chmod -R go-w {shown}")


def _check_within(fd: int, where: str, shown: str, trusted: frozenset[int], depth: int) -> None:
    for name in sorted(os.listdir(fd)):
        info = os.stat(name, dir_fd=fd, follow_symlinks=False)
        part = os.path.join(where, name)
        _check_part(info, part, shown, trusted)
        if stat.S_ISDIR(info.st_mode):
            if depth == 1:
                raise DamagedImage(path=shown, detail=f"{part} is a folder, and no image has one there")
            inner = open_folder(name, fd)
            try:
                _check_within(inner, part, shown, trusted, depth - 1)
            finally:
                os.close(inner)


def _refused(shown: str, detail: str, hint: str | None = None) -> UntrustedImage:
    if hint is None:
        hint = "whoever can write an image can run code as whoever restores it; copy it if you trust where it is from"
    return UntrustedImage(path=shown, detail=detail, hint=hint)


def _served(server: int) -> str:
    return f"a file system that {f'user {server}' if server >= 0 else 'nobody knows who'} serves"


def _names(trusted: frozenset[int]) -> str:
    return " or ".join("root" if uid == 0 else f"user {uid}" for uid in sorted(trusted))
