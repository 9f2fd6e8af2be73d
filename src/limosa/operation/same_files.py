"""Whether CRIU has opened the files that were looked at, and no others.

CRIU opens by name what a job had open, as root, while its user may put another file, or a link, under that name. The
guard in our plugin protects it from his links (``native/criu/guard.c``), but not from everything else. So Limosa looks
at each name of the image right before, by a descriptor and without following links. When CRIU has built everything and
nothing runs yet ("post-restore"), Limosa compares every descriptor, mapping, folder and program of every process with
what it saw: device, inode and kind. If one differs, the tree is ended, and the image is the copy.

A file that was looked at must be one that the job may have: the inode that it had, or one that its user may open.
"""

from __future__ import annotations

import bisect
import contextlib
import os
import pwd
import re
import shlex
import stat
import time
from collections.abc import Collection, Iterator
from typing import NamedTuple

from limosa.errors import DamagedImage, NoWorkingCriu, Reason, Refused
from limosa.image import Image, Manifest, OpenFile
from limosa.process.criu.named import Remapped, Socket, Uses, named, sockets
from limosa.process.descriptors import read_mounts
from limosa.start import real_path, trusted

TRIED_AGAIN = "limosa restore tries it again"
_GHOST = re.compile(r"(\.cr_link)? \(deleted\)|\.cr\.[0-9a-f]+\.ghost")  # after its name
_GPU, _ZEROES = "/dev/nvidia", "/dev/zero (deleted)"
_IN_PROC = re.compile(r"([0-9]+)(/|\Z)")
_PATH = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


class Seen(NamedTuple):
    """A file, whatever its name: device, inode, kind (``S_IFMT``)."""

    device: int
    inode: int
    kind: int


def seen(info: os.stat_result) -> Seen:
    """Return which file it is."""
    return Seen(info.st_dev, info.st_ino, stat.S_IFMT(info.st_mode))


class Looked:
    """The named files of an image as they are right before CRIU opens them.

    Raises Refused (a name leads to a file that the job's user may not have), DamagedImage (CRIU's files are
    unreadable).
    """

    def __init__(self, image: Image):
        manifest = image.manifest
        try:
            self._named = named(image.criu_fd, [p.pid for p in manifest.tree])
        except (OSError, ValueError) as error:
            raise DamagedImage(path=image.path, detail=f"CRIU's files: {error}") from error
        if os.geteuid() == 0:
            for one in self._named.sockets:
                _look_at_socket(one, manifest.job.uid, manifest.job.gid)
        self._since = time.time() - 1.0
        self._proc = os.stat("/proc").st_dev
        self._uid = manifest.job.uid
        self._procs = [mount for mount in read_mounts("/proc/self").values() if mount.proc_root is not None]
        had: dict[str, list[OpenFile]] = {}
        for file in manifest.open_files:
            if not file.deleted:
                had.setdefault(file.path, []).append(file)
        self._files: dict[str, Seen | None] = {}
        anew = {key for key, one in self._named.remapped.items() if one.kind != "linked"}
        for name in dict.fromkeys(name for key, name in self._named.names.items() if key not in anew):
            self._files[name] = _look(name, had.get(name, ()), manifest)

    def need_guard(self) -> None:
        """Raises NoWorkingCriu where CRIU, without our guard, makes a name in a folder that another user can change."""
        found = self._named
        made = [
            *(one.name for one in found.sockets if not one.outside),
            *(found.names.get(key, "/") for key, one in found.remapped.items() if one.kind == "ghost"),
        ]
        for name in made:
            if not trusted(os.path.dirname(name)):
                text = f"{name} is made in a folder that others than root can change, and Limosa's plugin is not built"
                raise NoWorkingCriu(detail=text, hint="limosa doctor --fix builds it")

    def in_the_way(self, said: str) -> list[Reason]:
        """What was missing, or in the way, of the names that an error of CRIU's has in it."""
        found = []
        for name, there in self._files.items():
            made_anew = name.startswith("/dev/pts/")  # there once CRIU has its number
            if there is None and not made_anew and name.strip("/") and name.lstrip("/") in said:
                text = f"{name}, which the job had open, is missing"
                found.append(Reason(id="file-missing", text=text, exit_code=23, hint="put it back"))
        for one in self._named.sockets:
            if one.outside or one.name not in said:
                continue
            folder = os.path.dirname(one.name)
            if not os.path.isdir(folder):
                text, hint = f"{folder}, where the job had a socket, is missing", f"mkdir -p {shlex.quote(folder)}"
                found.append(Reason(id="file-missing", text=text, exit_code=23, hint=hint))
            elif _is_no_socket(one.name):
                text = f"{one.name}, a socket of the job's, is something else now"
                found.append(Reason(id="file-changed", text=text, exit_code=23, hint="move it away"))
        return found

    def check(self) -> None:
        """Compares, at "post-restore", when all is there and nothing runs; Refused: one is another file."""
        for pid, uses in self._named.processes.items():
            for what, key, path in _objects(pid, uses):
                if reason := self._other(pid, what, key, path):
                    raise Refused([reason])

    def _other(self, pid: int, what: str, key: int, path: str) -> Reason | None:
        name = self._named.names.get(key)
        if name is None:
            return None  # of no file system
        try:
            info = os.stat(path)
        except FileNotFoundError:
            return None
        except PermissionError:
            if os.geteuid():
                return None  # not root's: what CRIU may open here its caller may open
            raise
        remapped = self._named.remapped.get(key)
        if (remapped is None or remapped.kind != "proc") and self._tells_of_others(info, path):
            text = f"{name}, {what} of process {pid}, tells of a process now that is not its user's"
            return Reason(id="file-changed", text=text, exit_code=23, pid=pid)
        if remapped is not None and remapped.kind != "linked":
            fine = self._is_anew(info, os.readlink(path), remapped, name)
        elif name.startswith(_GPU) and os.readlink(path) == _ZEROES and info.st_nlink == 0:
            fine = True  # what our plugin has CRIU map in place of a GPU's memory that a child has inherited
        elif name.startswith("/proc/") and self._files.get(name) is None:
            fine = info.st_dev == self._proc
        else:
            was = self._files.get(remapped.name if remapped else name)
            fine = was == seen(info)
            if was is not None and not fine and stat.S_ISLNK(was.kind):
                text = f"{name}, {what} of process {pid}, leads through a symbolic link now"
                hint = f"put what it was in the place of the link to {os.readlink(path)}"
                return Reason(id="file-changed", text=text, exit_code=23, pid=pid, hint=hint)
        if fine:
            return None
        text = f"{name} was exchanged while the job was restored: {what} of process {pid} is {os.readlink(path)}"
        return Reason(id="file-changed", text=text, exit_code=23, pid=pid, hint=TRIED_AGAIN)

    def _tells_of_others(self, info: os.stat_result, path: str) -> bool:
        """Whether it is procfs's of a process (its memory, perhaps) that is neither the job's nor its user's.

        CRIU opens it as root by its path, ``/proc/PID/…``, and a number is some other process's later: a program's that
        its user has started, and that runs with root's rights.
        """
        link = os.readlink(path)
        inside = (mount.inside(link) for mount in self._procs if link.startswith(f"{mount.point}/"))
        found = next((match for match in map(_IN_PROC.match, inside) if match), None)
        if found is None or int(found[1]) in self._named.processes:
            return False
        return self._uid not in (0, info.st_uid)

    def _is_anew(self, info: os.stat_result, link: str, remapped: Remapped, name: str) -> bool:
        """Whether it is what CRIU has made of a file without a name, just now."""
        if remapped.kind == "proc":
            return info.st_dev == self._proc
        if stat.S_ISDIR(info.st_mode):
            fine = _is_folder_anew(link.removesuffix(" (deleted)"), name) and info.st_ctime >= self._since
            return fine and (info.st_uid, info.st_gid) == remapped.owner
        # At its own name: a link to another's deleted file, in the place of what CRIU has made, is called otherwise.
        called = link.startswith(name) and _GHOST.fullmatch(link, len(name)) is not None
        new = info.st_nlink <= 1 and info.st_ctime >= self._since
        return called and new and (info.st_uid, info.st_gid) == remapped.owner


def _is_folder_anew(at: str, name: str) -> bool:
    """Whether CRIU makes a folder that was removed there: at its very name, or above where those are gone too."""
    (above, had), (folder, wanted) = os.path.split(at), os.path.split(name)
    return had == wanted and os.path.commonpath([above, folder]) == above


def _objects(pid: int, uses: Uses) -> Iterator[tuple[str, int, str]]:
    """What a process has of named files: in words, the file's number, and where it is in /proc."""
    at = f"/proc/{pid}"
    for fd, key in uses.fds.items():
        yield f"descriptor {fd}", key, f"{at}/fd/{fd}"
    for link, key in uses.links.items():
        yield link, key, f"{at}/{link}"
    if not uses.maps:
        return
    listed: list[str] = []
    with contextlib.suppress(OSError):
        listed = os.listdir(f"{at}/map_files")
    ranges = sorted((int(name.partition("-")[0], 16), name) for name in listed)
    starts = [start for start, _ in ranges]
    for address, key in uses.maps.items():
        nearest = bisect.bisect_right(starts, address) - 1
        if nearest >= 0:
            yield f"the mapping at {address:x}", key, f"{at}/map_files/{ranges[nearest][1]}"


def _is_no_socket(path: str) -> bool:
    with contextlib.suppress(OSError):
        return not stat.S_ISSOCK(os.lstat(path).st_mode)
    return False


def _look(name: str, had: Collection[OpenFile], manifest: Manifest) -> Seen | None:
    """Which file has a name now; None: there is none, as CRIU will find. Refused: it is none that the job may have."""
    try:
        fd = os.open(name, _PATH)
    except OSError:
        return None
    try:
        info, real = os.fstat(fd), os.readlink(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)
    if stat.S_ISLNK(info.st_mode) and real == name and not had:
        return seen(info)  # the link itself, which a job may have open; what it leads to is of another kind
    if stat.S_ISLNK(info.st_mode) or real != name:
        if os.geteuid() == 0 and real_path(name) != real:
            raise _changed(f"{name} leads through a symbolic link of somebody else's")
        try:
            return seen(os.stat(name))
        except OSError:
            return None
    known = {file.inode for file in had if file.inode}
    writes = any(file.flags & os.O_ACCMODE != os.O_RDONLY for file in had)
    if known and info.st_ino not in known and not _may_open(info, manifest, writes=writes):
        raise _changed(f"{name} is another file than the job had, and its user may not open it")
    return seen(info)


def look_at_sockets(images_fd: int, uid: int, gid: int) -> None:
    """Raises Refused (``socket-name``), before the job ends, where root could not make its sockets' names again."""
    try:
        for one in sockets(images_fd):
            _look_at_socket(one, uid, gid)
    except Refused as error:
        text = f"{error.reasons[0].text}: root could not bring it back"
        hint = "a link in its name that is root's, a folder of its owner's; or without root, as the job's user"
        raise Refused([Reason(id="socket-name", text=text, exit_code=13, hint=hint, forceable=True)]) from error


def _look_at_socket(found: Socket, uid: int, gid: int) -> None:
    """Refuses the name of a unix socket that leads elsewhere, or that somebody else has now, or may have.

    CRIU removes what lies there, makes the socket anew and gives it to its owner. A name does not say where the socket
    was: in a root folder or a namespace of his own, a user gives it any name. So it is made only if its owner could
    make it there, and the job is connected to one outside only if its user could.
    """
    name = found.name
    owner = uid if found.owner < 0 else found.owner
    what = f"{name}, a socket of the job's," if not found.outside else f"{name}, to which the job is connected,"
    folder = os.path.dirname(name)
    if os.path.normpath(name).lstrip("/").startswith("proc/") or real_path(folder) != os.path.realpath(folder):
        raise _changed(f"{what} leads through a symbolic link of somebody else's")
    if found.outside:
        if os.path.exists(name) and not _may_reach(name, uid, gid, 0o2):
            raise _changed(f"{what} is not for its user to connect to")
        return
    info = None
    with contextlib.suppress(OSError):
        info = os.lstat(name)
    if info is not None and info.st_uid != owner:
        raise _changed(f"{what} is user {info.st_uid}'s now", hint="end who has it, or wait")
    if uid == 0 and (owner == 0 or info is not None):
        return  # made by root, and given away
    if not _may_reach(_nearest(folder), owner or uid, found.group if owner else gid, 0o3):
        raise _changed(f"{what} is in a folder where its user cannot make one")


def _changed(text: str, hint: str = "") -> Refused:
    return Refused([Reason(id="file-changed", text=text, exit_code=23, hint=hint)])


def _nearest(folder: str) -> str:
    """A folder; the nearest one above where it is gone: CRIU makes it anew for a socket whose name was gone."""
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    return folder


def _may_open(info: os.stat_result, manifest: Manifest, *, writes: bool) -> bool:
    uid, gid = manifest.job.uid, manifest.job.gid
    return uid == info.st_uid or _may(info, uid, groups_of(uid, gid), 0o6 if writes else 0o4)


def _may_reach(path: str, uid: int, gid: int, wanted: int) -> bool:
    """Whether a user may go to a file and do that (bits of a mode), by owners, groups and modes."""
    groups, at = groups_of(uid, gid), os.path.realpath(path)
    if not _may(os.stat(at), uid, groups, wanted):
        return False
    while at != "/":
        at = os.path.dirname(at)
        if not _may(os.stat(at), uid, groups, 0o1):
            return False
    return True


def _may(info: os.stat_result, uid: int, groups: Collection[int], wanted: int) -> bool:
    shift = 6 if info.st_uid == uid else 3 if info.st_gid in groups else 0
    return uid == 0 or info.st_mode >> shift & wanted == wanted


def groups_of(uid: int, gid: int) -> list[int]:
    """Return a user's groups, this one first."""
    try:
        return os.getgrouplist(pwd.getpwuid(uid).pw_name, gid)
    except KeyError:
        return [gid]
