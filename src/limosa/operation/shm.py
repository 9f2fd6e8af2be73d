"""Named shared memory and semaphores (shm_overview(7), sem_overview(7)): a job is written to disk with what is in them.

They are files in /dev/shm that a job has mapped to write into them: its state like the rest of its memory. What is in
them is in the image, where no process outside of the job has them mapped as well; a restore makes them anew, under all
of their names. What is there under these names then is what the job has left; where somebody else uses it, it stays,
and the restore is refused.

Semaphores have one more trait. The C library makes one under a name for a moment (``sem_open`` in glibc:
``/dev/shm/sem.XXXXXX``), gives it its own name and takes the first one away: the process that made it has it mapped by
a name that is gone. CRIU wants that name to be there, at the dump and at a restore, just as /proc has it
(``/dev/shm/sem.XXXXXX (deleted)``; check_path_remap in its files-reg.c). It is there for as long as CRIU is at work;
CRIU's own way (``--link-remap``) leaves names that another job's dump stumbles over, and an image that can be restored
once.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Callable, Collection, Iterable, Iterator

from limosa.errors import FailedUndone, Reason, Refused
from limosa.image import ShmFile, copy_sparse, open_file
from limosa.image.files import rename_new
from limosa.image.manifest import CRIU_NAME
from limosa.process.hazards import SEMAPHORE_LIMIT
from limosa.process.slurp import lines, pieces

FOLDER = "/dev/shm"  # noqa: S108 - where the C library has them
_GONE = " (deleted)"  # proc_pid_maps(5)
_LOST = re.compile(rb"^\S+ \S+ \S+ (\S+) (\d+) +(/dev/shm/[^/\n]+ \(deleted\))$", re.MULTILINE)
_SHARED = re.compile(rb"^\S+ .w.s \S+ (\S+) (\d+) +(/dev/shm/[^/\n]+)$", re.MULTILINE)
_DRIVERS = f"{FOLDER}/cuda."  # its own: it makes them anew
_REMAP = f"{FOLDER}/link_remap."  # CRIU's own names
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

Made = dict[str, int]
"""Names and the number of the inode that each was given to."""


def to_note(made: Made) -> Made:
    """Names as a journal takes them, which is text: each byte a character."""
    return {os.fsencode(name).decode("latin-1"): inode for name, inode in made.items()}


def of_note(made: Made) -> Made:
    """The reverse."""
    return {os.fsdecode(name.encode("latin-1")): inode for name, inode in made.items()}


# --- dumping --------------------------------------------------------------------------------------------------


class Lost:
    """The names that are gone by which a job has semaphores mapped, as /proc has them."""

    def __init__(self) -> None:
        self.names: Made = {}
        self.remaps: Made = {}  # names that CRIU has given itself
        self.shared: set[int] = set()  # inodes of what the job has mapped, by whatever name, to write into it
        self._seen: set[int] = set()

    def look(self, pids: Iterable[int], *, again: bool = False) -> None:
        """Looks; where nothing has come into the folder since the last time only if asked to, for it takes a while."""
        there = _by_inode()
        if there.keys() <= self._seen and not again:
            return
        self._seen = set(there)
        # What is there by such a name is really called so.
        self.names = {name: inode for name, inode in _lost(pids, there) if name not in there[inode]}

    def look_for_shared(self, pids: Iterable[int], others: Collection[int]) -> None:
        """Looks what the job, which is frozen, shares within itself; ``others``: inodes that it shares with others."""
        there = _by_inode()
        self.shared = {
            inode
            for name, inode in _mapped(pids, _SHARED)
            if name in there.get(inode, []) and not name.startswith(_DRIVERS)
        }.difference(others)

    def look_for_remaps(self, pids: Iterable[int]) -> None:
        """Looks which names CRIU has given (``--link-remap``) what was lost since the last look; the job is frozen."""
        there = _by_inode()
        self.remaps = {
            name: inode for _, inode in _lost(pids, there) for name in there[inode] if name.startswith(_REMAP)
        }


def _lost(pids: Iterable[int], there: dict[int, list[str]]) -> Iterator[tuple[str, int]]:
    return ((name, inode) for name, inode in _mapped(pids, _LOST) if _is_small(there, inode))


def _mapped(pids: Iterable[int], pattern: re.Pattern[bytes]) -> Iterator[tuple[str, int]]:
    """What processes have mapped of that file system, of the lines of ``maps`` that fit: (name, inode)."""
    device = _device()
    for pid in pids:
        with contextlib.suppress(OSError):
            for piece in pieces(f"/proc/{pid}/maps"):
                for dev, inode, name in pattern.findall(piece):
                    if dev == device:
                        yield os.fsdecode(name), int(inode)


def _device() -> bytes:
    """The folder's device, as ``maps`` has it: each such file system counts its inodes from one."""
    try:
        device = os.stat(FOLDER).st_dev
    except OSError:
        return b""
    return b"%02x:%02x" % (os.major(device), os.minor(device))


def _is_small(there: dict[int, list[str]], inode: int) -> bool:
    with contextlib.suppress(OSError):  # it goes just now
        return inode in there and os.lstat(there[inode][0]).st_size <= SEMAPHORE_LIMIT
    return False


def give_back(lost: Made) -> Made:
    """Gives semaphores a name that they had: those given. Who has it again or is not found is left to CRIU to judge."""
    given = {}
    names = _by_inode() if lost else {}
    for name, inode in lost.items():
        with contextlib.suppress(OSError):
            for other in names.get(inode, [])[:1]:
                os.link(other, name, follow_symlinks=False)
                given[name] = inode
    return given


def take_away(made: Made) -> None:
    """Removes those names that still lead to the inode that they were given to.

    A process that mapped it by a name that was there for CRIU then lacks the same name as before: a renamed file is
    renamed for its holders, too.
    """
    for name, inode in made.items():
        with contextlib.suppress(OSError):
            if os.lstat(name).st_ino == inode:
                before = name.removesuffix(_GONE)
                os.unlink(before if before != name and _renamed(name, before) else name)


def _renamed(name: str, to: str) -> bool:
    """Renames where nobody has that name; whether it did."""
    try:
        rename_new(name, to)
    except OSError:
        return False
    return True


def read(lost: Made, shared: Collection[int] = (), put: Callable[[str, int], None] = lambda *_: None) -> list[ShmFile]:
    """What is in them, read while nothing of the job moves.

    ``lost``: names of semaphores that are there for CRIU, each with its inode. ``shared``: inodes of what the job has
    mapped by its own name. ``put`` puts what is in an open file into CRIU's folder of the image, under a name. Raises
    OSError or LimosaError (one cannot be read, or written), FailedUndone (one is none any more).
    """
    found = []
    semaphores = set(lost.values())
    there = _by_inode() if lost or shared else {}
    for inode in sorted((semaphores | set(shared)) & there.keys()):
        gone = sorted(name for name, of in lost.items() if of == inode)
        content, kept = b"", ""
        with open(os.open(there[inode][0], _READ), "rb") as file:
            info = os.fstat(file.fileno())
            small = info.st_size <= SEMAPHORE_LIMIT
            if not stat.S_ISREG(info.st_mode) or info.st_ino != inode or (inode in semaphores and not small):
                raise FailedUndone(what="checkpoint", detail=f"{there[inode][0]} has grown in the middle of it")
            if small:
                content = file.read(SEMAPHORE_LIMIT)
            else:
                kept = f"limosa-shm-{inode}.img"
                put(kept, file.fileno())
        found.append(
            ShmFile(
                names=[name for name in there[inode] if name not in gone],
                lost=gone,
                content=content.hex(),
                file=f"{CRIU_NAME}/{kept}" if kept else "",
                bytes=info.st_size,
                mode=stat.S_IMODE(info.st_mode),
                uid=info.st_uid,
                gid=info.st_gid,
            )
        )
    return found


def _by_inode() -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    with contextlib.suppress(OSError), os.scandir(FOLDER) as entries:
        for entry in entries:
            found.setdefault(entry.inode(), []).append(entry.path)
    return {inode: sorted(names) for inode, names in found.items()}


# --- restoring ------------------------------------------------------------------------------------------------


def in_the_way(files: Iterable[ShmFile]) -> list[Reason]:
    """The names that somebody uses, or that now belong to something such a job does not leave."""
    there: dict[int, str] = {}
    reasons = []
    for file in files:
        for name in (*file.names, *file.lost):
            try:
                info = os.lstat(name)
            except FileNotFoundError:
                continue
            except OSError as error:
                text = f"{name} cannot be made: {error.strerror}"
                reasons.append(Reason(id="file-changed", text=text, exit_code=23))
                continue
            if _is_like(info, file):
                there[info.st_ino] = name
            else:
                text = f"{name} is another file than the job's shared memory or semaphore"
                reasons.append(Reason(id="file-changed", text=text, exit_code=23, hint="put it elsewhere"))
    return reasons + _used(there)


def _used(there: dict[int, str]) -> list[Reason]:
    """The processes that map one of these files."""
    reasons: list[Reason] = []
    device = _device()
    for name in os.listdir("/proc") if there else ():
        if not name.isdigit():
            continue
        with contextlib.suppress(OSError):
            for line in lines(f"/proc/{name}/maps"):
                words = line.split(None, 5)
                if len(words) == 6 and words[3] == device and int(words[4]) in there:
                    text = f"process {name} uses {there[int(words[4])]}, which the restored job would have anew"
                    hint = "end that process first"
                    reasons.append(Reason(id="shm-used", text=text, exit_code=23, hint=hint, pid=int(name)))
                    break
    return reasons


def _is_like(info: os.stat_result, file: ShmFile) -> bool:
    had = (file.bytes, file.mode, file.uid, file.gid)
    return stat.S_ISREG(info.st_mode) and had == (info.st_size, stat.S_IMODE(info.st_mode), info.st_uid, info.st_gid)


class Remade:
    """Shared memory and semaphores made anew for a restore; FailedUndone: one cannot be, or its content is missing.

    ``stop`` is called while they are filled, from the image's ``criu/``, and raises what ends that.
    """

    def __init__(self, files: Iterable[ShmFile], criu_fd: int = -1, stop: Callable[[], None] = lambda: None):
        self._fds: list[tuple[int, ShmFile]] = []
        self.names: Made = {}
        self.lost: Made = {}
        try:
            for file in files:
                fd = os.open(FOLDER, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
                self._fds.append((fd, file))
                if file.file:
                    _fill(fd, file, criu_fd, stop)
                else:
                    os.write(fd, bytes.fromhex(file.content))
                os.fchown(fd, file.uid, file.gid)
                os.fchmod(fd, file.mode)
                inode = os.fstat(fd).st_ino
                self.names |= dict.fromkeys(file.names, inode)
                self.lost |= dict.fromkeys(file.lost, inode)
        except OSError as error:
            self.close()
            raise FailedUndone(what="restore", detail=f"shared memory in {FOLDER}: {error.strerror}") from error
        except BaseException:
            self.close()
            raise

    def put(self) -> None:
        """Gives them their names, in place of what the job has left there; Refused, FailedUndone: somebody has one."""
        there = {}
        for name in self.names | self.lost:
            with contextlib.suppress(OSError):
                there[os.lstat(name).st_ino] = name
        if used := _used(there):
            raise Refused(used)
        try:
            for fd, file in self._fds:
                for name in (*file.names, *file.lost):
                    with contextlib.suppress(FileNotFoundError):
                        if _is_like(os.lstat(name), file):
                            os.unlink(name)
                    # With a descriptor Python asks the kernel to follow this link (linkat(2), O_TMPFILE in open(2)).
                    os.link(f"/proc/self/fd/{fd}", name, src_dir_fd=fd, follow_symlinks=True)
        except OSError as error:
            raise FailedUndone(what="restore", detail=f"{name}: {error.strerror}") from error

    def undo(self) -> None:
        """Takes all of it away again: the image has it."""
        take_away(self.names | self.lost)
        self.close()

    def done(self) -> None:
        """CRIU has opened them."""
        take_away(self.lost)
        self.close()

    def close(self) -> None:
        """Lets go of the descriptors."""
        while self._fds:
            os.close(self._fds.pop()[0])


def _fill(fd: int, file: ShmFile, criu_fd: int, stop: Callable[[], None]) -> None:
    source = open_file(file.file.partition("/")[2], criu_fd)
    try:
        if os.fstat(source).st_size != file.bytes:
            raise FailedUndone(what="restore", detail=f"{file.file} has not the {file.bytes} bytes that it had")
        copy_sparse(source, fd, stop)
    finally:
        os.close(source)
