"""The folders of Limosa's records: ``/run/limosa/0`` for root, ``/tmp/limosa-UID`` for a user.

Nobody but root writes below ``/run/limosa`` (0755), so nobody can fill it, take a name there or hold a lock of
root's. A user's folder lies where everybody may make files anyway, and outlives his logout, as a suspended job does.
Each user writes only into his own folder, even about others' jobs: root writes a record of a user's job into root's.

Somebody else may have made ``/tmp/limosa-1001`` before uid 1001 did. That user's Limosa makes and uses
``/tmp/limosa-1001.RANDOM`` then, and finds it again by listing. Others find users' folders by the same listing: names
of that one form whose folder belongs to that very uid and is written by nobody else. Names that are somebody else's
cost time and hide nothing. A listing is cut off at a size that no machine reaches by itself. If the caller must know
what is there, that is an error. Otherwise the folders of users who have processes now are looked for.

``LIMOSA_RUNTIME_DIR=D`` puts root's folder at ``D/0`` and users' below ``D/users``, which root makes as open as
``/tmp`` is. Root believes D only if nobody else can have put another folder there.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from limosa.errors import FailedUndone, NoRoomOnHost, PermissionDenied, UsageError
from limosa.ipc.packet import close_all
from limosa.process.limits import many_descriptors
from limosa.process.openat import closing, nothing_there, only_by, open_folder_in, open_in

RUN, TMP = Path("/run/limosa"), Path("/tmp")  # noqa: S108 - sticky, and whose a folder is there is looked at
_SETTING = "LIMOSA_RUNTIME_DIR"
_FORM = re.compile(r"limosa-([1-9][0-9]{0,9})(?:\.[0-9a-f]{8})?")
_MOST_LISTED, _MOST_OF_ONE = 100_000, 4
_MOST_BYTES = 64 << 20  # of a folder itself: one that had millions of names is slow to list when they are gone
_LISTING_SECONDS = 5.0  # for one user's, among any number of others' names
_found: dict[tuple[Path, int], set[str]] = {}
"""Names by which users without the plain one were found: a job may stand still while the next one looks."""
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class Folder(NamedTuple):
    """A user's folder for one kind of thing.

    Attributes:
        uid: whose it is, and who alone may have written to it.
        path: its path, to be told. Only in the caller's own may it be used.
        fd: its descriptor.
    """

    uid: int
    path: Path
    fd: int


# -- where -------------------------------------------------------------------------------------------------------


def _setting() -> Path | None:
    text = os.environ.get(_SETTING)
    if text and not os.path.isabs(text):  # a worker or the mover would look for it elsewhere
        raise UsageError(
            detail=f"{_SETTING}={text} is not an absolute path", hint=f"{_SETTING}={os.path.abspath(text)}"
        )
    return Path(os.path.realpath(text)) if text else None


def base() -> Path:
    """The folder that ``doctor`` names: ``/run/limosa``, or what ``LIMOSA_RUNTIME_DIR`` says."""
    return _setting() or RUN


def roots_place() -> Path:
    """Where root's folder is."""
    return base() / "0"


def users_place() -> Path:
    """Where users' folders are."""
    chosen = _setting()
    return TMP if chosen is None else chosen / "users"


def owner_of(name: str) -> int:
    """The uid in the name of a user's folder; -1 for another name."""
    form = _FORM.fullmatch(name)
    return int(form[1]) if form is not None else -1


# -- the caller's own --------------------------------------------------------------------------------------------


def own_place() -> Path:
    """The caller's own folder, made where it is missing: nobody else can write to it or put another in its place.

    Raises:
        PermissionDenied: it is not a folder that only the caller can write to.
        NoRoomOnHost: it cannot be made for want of room.
        FailedUndone: it cannot be made.
    """
    uid = os.geteuid()
    chosen = _setting()
    if chosen is not None:
        _chosen(chosen, uid)
    if uid == 0:
        return _roots(RUN if chosen is None else chosen)
    return _users(TMP if chosen is None else chosen / "users", uid)


def own_folder(kind: str) -> Path:
    """The caller's folder for one kind of thing (``jobs``, ``claims``, ``vault`` …), made where missing.

    Raises:
        LimosaError: as of ``own_place``.
    """
    return _owned(own_place() / kind, os.geteuid())


def open_own(kind: str) -> Folder:
    """The same, open; the descriptor is the caller's to close.

    Raises:
        LimosaError: as of ``own_place``.
    """
    path = own_folder(kind)
    return Folder(os.geteuid(), path, os.open(path, _DIRECTORY | os.O_NOFOLLOW))


def keep_from_cleaners() -> int:
    """Lock the caller's folder (shared) for as long as the descriptor is open: systemd-tmpfiles leaves it alone then.

    Raises:
        LimosaError, OSError: it cannot be opened or locked.
    """
    fd = os.open(own_place(), _DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _chosen(path: Path, uid: int) -> None:
    """Makes the folder that ``LIMOSA_RUNTIME_DIR`` names, and that of users in it; refuses one that others can change.

    Raises:
        PermissionDenied: it cannot be made, or is not safe.
    """
    if uid == 0:  # before anything is made: who can change names there could put a link in its place
        for above in path.parents:
            _refuse_unsafe(above, path, uid)
    for folder, mode in ((path, 0o755), (path / "users", 0o1777 if uid == 0 else 0o755)):
        with contextlib.suppress(OSError):
            os.mkdir(folder, 0o700)
            os.chmod(folder, mode)  # past the umask; the folder is new and ours
        _refuse_unsafe(folder, path, uid)


def refuse_unusable() -> None:
    """Refuses a folder of ``LIMOSA_RUNTIME_DIR`` in which nothing would be believed; makes nothing.

    For whoever looks for jobs by name: they would not be there.

    Raises:
        PermissionDenied: it is not safe.
        UsageError: it is no absolute path.
    """
    path, uid = _setting(), os.geteuid()
    if path is not None:
        for folder in (*(path.parents if uid == 0 else ()), path, path / "users"):
            if os.path.lexists(folder):
                _refuse_unsafe(folder, path, uid)


def _refuse_unsafe(folder: Path, path: Path, uid: int) -> None:
    """Refuses the runtime folder ``path`` for what one of the folders that it is in, or has, is."""
    wrong = f"{_SETTING}={path} cannot be made or is not safe to use"
    try:
        found = os.lstat(folder)
    except OSError as error:
        raise PermissionDenied(detail=f"{wrong}: {folder}: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode):
        raise PermissionDenied(detail=f"{wrong}: {folder} is not a folder")
    if not _safe(found, uid):
        raise PermissionDenied(detail=f"{wrong}: others may change what is in {folder}")
    if uid == 0 and folder == path and found.st_mode & 0o022:  # ``0`` and ``users`` in it are not to be anybody else's
        raise PermissionDenied(detail=f"{wrong}: others may make folders in {path}", hint=f"chmod 755 {path}")


def _safe(found: os.stat_result, uid: int) -> bool:
    """Whether nobody but root and that user can change names in it that are not his own."""
    open_to_others = bool(found.st_mode & 0o022) and not found.st_mode & stat.S_ISVTX
    return stat.S_ISDIR(found.st_mode) and found.st_uid in (0, uid) and not open_to_others


def _tighten(path: Path) -> None:
    """Takes a folder of root's from everybody else: older versions left it as open as ``/tmp``."""
    with closing(os.open(path, _DIRECTORY | os.O_NOFOLLOW)) as fd:
        found = os.fstat(fd)
        if found.st_uid != 0:
            raise PermissionDenied(detail=f"{path} is not root's", hint=f"look at {path}; root may remove it")
        if found.st_mode & 0o022:
            os.fchmod(fd, 0o755)


def _roots(path: Path) -> Path:
    """Root's own folder. What somebody put in its place when everybody could is moved away and never looked at."""
    if path == RUN:
        _made(path)
        _tighten(path)
    own = path / "0"
    with contextlib.suppress(FileNotFoundError):
        found = os.lstat(own)
        if found.st_uid != 0 or not stat.S_ISDIR(found.st_mode):
            os.rename(own, path / f"not-roots-{secrets.token_hex(4)}")
    return _owned(own, 0)


def _users(place: Path, uid: int) -> Path:
    """A user's own folder: by the plain name, or, where that is somebody else's, by one with something random."""
    try:
        with closing(os.open(place, _DIRECTORY)) as users:
            if not _safe(os.fstat(users), uid):
                raise PermissionDenied(
                    detail=f"others may change what is in {place}: uid {uid} has no place to keep records",
                    hint=f"{_SETTING} names another folder",
                )
            complete = True
            if not (own := _first(users, {f"limosa-{uid}"}, place, uid)):
                names, complete = _listed(users, place, uid, whole=True)
                own = _first(users, names, place, uid)
            if own:
                return place / own
            if not complete:  # a new one would be used from now on, and what is in his old one forgotten
                raise _too_many(place)
    except OSError as error:
        raise _cannot(place, error) from error
    try:
        return _owned(place / f"limosa-{uid}", uid, taken=True)
    except FileExistsError:
        return _owned(place / f"limosa-{uid}.{secrets.token_hex(4)}", uid)


def _first(users: int, names: set[str], place: Path, uid: int) -> str:
    """The first of them that is a folder of the caller's that nobody else may write to, or ""."""
    for name, fd in _believed(users, names, place, uid, whole=True):
        os.close(fd)
        return name
    return ""


def _made(path: Path, mode: int = 0o755) -> bool:
    """Makes a folder; False where something is there.

    Raises:
        LimosaError: it cannot be made.
    """
    try:
        os.mkdir(path, 0o700)
        os.chmod(path, mode)  # past the umask; the folder is new and ours
    except FileExistsError:
        return False
    except OSError as error:
        raise _cannot(path, error) from error
    return True


def _cannot(path: Path, error: OSError) -> NoRoomOnHost | PermissionDenied | FailedUndone:
    text = f"{path}, where Limosa notes what it is doing, cannot be made: {error.strerror}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return NoRoomOnHost(detail=text)
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return PermissionDenied(detail=text)
    return FailedUndone(text)


def _owned(path: Path, uid: int, *, taken: bool = False) -> Path:
    """Makes ``path`` where it is missing and makes sure that it is a folder of ``uid`` that nobody else can write.

    Args:
        path: the folder.
        uid: the caller.
        taken: whether something of somebody else's there is a FileExistsError.

    Raises:
        LimosaError: it is not, or cannot be made.
        FileExistsError: see ``taken``.
    """
    _made(path)
    found = os.lstat(path)
    if only_by(found, uid):
        return path
    if taken and found.st_uid != uid:
        raise FileExistsError(path)
    raise PermissionDenied(
        detail=f"{path} is not a folder that only uid {uid} can write to",
        hint=f"look at {path}; if it is a folder of yours: chmod 755 {path}",
    )


# -- everybody's -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def folders(kind: str, uid: int | None = None, *, whole: bool = False) -> Iterator[list[Folder]]:
    """Open every user's folder for one kind of thing that is safe to read: the caller's first, then root's.

    Args:
        kind: ``jobs``, ``claims``, ``vault`` …
        uid: only this user's (he may have several if somebody took his name).
        whole: whether the caller relies on something being missing, to give up a job's last copy, for example.

    Raises:
        FailedUndone: with ``whole``: nobody can say what is there, because this process can open no more files, for
            example. For other users' folders only if one user is asked for (all users can make as many as they like).
            Also if that user has no folder with the plain name, and there are more names than are looked at.
    """
    caller, found = os.geteuid(), []
    with many_descriptors():
        try:
            for place in _places(uid, whole):
                with closing(place.fd), if_there(place.path, place.uid, _sure(place.uid, uid, whole)):
                    found.append(Folder(place.uid, place.path / kind, open_folder_in(place.fd, kind, place.uid)))
            yield sorted(found, key=lambda f: (f.uid != caller, f.uid, f.path))
        finally:
            for folder in found:
                os.close(folder.fd)


@contextlib.contextmanager
def if_there(path: Path, uid: int, whole: bool) -> Iterator[None]:
    """Ignores what is not there, may not be read, or does not count.

    Args:
        path: the place, for messages.
        uid: the user who alone may write there.
        whole: whether the caller must know that it is not there.

    Raises:
        FailedUndone: with ``whole``: nobody can say whether it is there.
    """
    try:
        yield
    except OSError as error:
        if whole and not nothing_there(error, uid in (0, os.geteuid())):
            text = f"{path}, where Limosa notes what it is doing, cannot be read: {error.strerror}"
            raise FailedUndone(text) from error


def _sure(uid: int, asked: int | None, whole: bool) -> bool:
    """Whether it has to be known what this user has: all of everybody's could be made too many to open."""
    return whole and (asked is not None or uid in (0, os.geteuid()))


def _places(uid: int | None, whole: bool = False) -> Iterator[Folder]:
    """Users' folders, open; whoever takes one closes it."""
    if uid in (None, 0):
        with if_there(base(), 0, whole), closing(os.open(base(), _DIRECTORY | os.O_NOFOLLOW)) as fd:
            if _safe(os.fstat(fd), 0):
                yield Folder(0, roots_place(), open_folder_in(fd, "0", 0))
    if uid == 0:
        return
    place = users_place()
    with if_there(place, 0, whole), closing(os.open(place, _DIRECTORY)) as users:
        if not _safe(os.fstat(users), os.geteuid()):
            return
        first = os.geteuid() if uid is None else uid
        if first > 0:
            yield from _of_one(users, place, first, whole)
        if uid is None:
            names, complete = _listed(users, place, None, whole)
            if not complete:
                names |= {f"limosa-{one}" for one in _with_processes()}
            others = {name for name in names if owner_of(name) != first}
            for name, fd in _believed(users, others, place, None, whole):
                yield Folder(owner_of(name), place / name, fd)


def _of_one(users: int, place: Path, uid: int, whole: bool) -> Iterator[Folder]:
    """A user's folders, open. A user who has the plain name has no other folder, so nothing need be listed."""
    own = list(_believed(users, {f"limosa-{uid}"} | _found.get((place, uid), set()), place, uid, whole))
    if not own:
        names, complete = _listed(users, place, uid, whole)
        if whole and not complete:
            raise _too_many(place)
        own = list(_believed(users, names, place, uid, whole))
        _found[place, uid] = {name for name, _ in own}
    try:
        while own:
            name, fd = own.pop(0)
            yield Folder(uid, place / name, fd)
    finally:
        close_all(fd for _, fd in own)


def _listed(users: int, place: Path, uid: int | None, whole: bool) -> tuple[set[str], bool]:
    """Names of folders that belong to the user whom they name (of that user's), and whether all have been looked at.

    So many of each user are kept, the first by name; names that are somebody else's are not counted. One user's are
    looked for among any number of names, for some seconds; everybody's only where there are not too many.
    """
    if uid is None and os.fstat(users).st_size > _MOST_BYTES:
        return set(), False
    found: dict[int, list[str]] = {}
    end = time.monotonic() + _LISTING_SECONDS
    with os.scandir(users) as entries:
        for n, entry in enumerate(entries):
            if (n >= _MOST_LISTED and uid is None) or (n % 1024 == 0 and time.monotonic() > end):
                return set(itertools.chain(*found.values())), False
            name = entry.name
            if (owner := owner_of(name)) <= 0 or uid not in (None, owner):
                continue
            kept = found.get(owner, [])
            if len(kept) >= _MOST_OF_ONE and name > kept[-1]:
                continue
            # Whether it is a folder the listing says: nobody is asked.
            if entry.is_dir(follow_symlinks=False) and _is_of(users, place, name, owner, _sure(owner, uid, whole)):
                found[owner] = sorted([*kept, name])[:_MOST_OF_ONE]
    return set(itertools.chain(*found.values())), True


def _is_of(users: int, place: Path, name: str, owner: int, sure: bool) -> bool:
    """Whether it is that user's folder and nobody else may write to it; no file system is entered or asked."""
    try:
        fd = open_in(users, name, os.O_PATH)
    except OSError:
        with if_there(place / name, owner, sure):
            raise
        return False
    found = os.fstat(fd)
    os.close(fd)
    return only_by(found, owner)


def _too_many(place: Path) -> FailedUndone:
    return FailedUndone(
        f"{place} has too many entries for Limosa to find its own among them",
        hint=f"ls -lU {place} | head shows whose they are; root may remove them",
    )


def _believed(users: int, names: set[str], place: Path, asked: int | None, whole: bool) -> Iterator[tuple[str, int]]:
    """Open those that are folders of the user whom they name, and are written by nobody else; some of each user's.

    The caller's own come first: there may be more of others' than can be opened.
    """
    caller = os.geteuid()
    ordered = sorted(names, key=lambda name: (owner_of(name) != caller, owner_of(name), name))
    for owner, group in itertools.groupby(ordered, owner_of):
        mine = 0
        for name in group:
            fd = -1
            with if_there(place / name, owner, _sure(owner, asked, whole)):
                fd = open_folder_in(users, name, owner)
            if fd < 0:
                continue
            yield name, fd
            if (mine := mine + 1) == _MOST_OF_ONE:
                break


def _with_processes() -> set[int]:
    """The users that have processes now."""
    found = set()
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                found.add(os.stat(f"/proc/{name}").st_uid)
    return found - {0}
