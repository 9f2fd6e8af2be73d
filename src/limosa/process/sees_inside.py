"""Which GPUs a job in a container sees, where ``limosa run --gpus`` was used in there.

The file that says so (``device_nodes``) is the container's: its path leads through the container's root, and the record
of the job is in there as well. So the process itself is asked, by its environment, and only where it has the library
mapped that reads the file. That is a hostile source: it can lead to nothing but a file of that process's own user, in a
folder ``sees``, that has numbers in it. Each step is opened by descriptor and no link is followed; it is written with
the user's rights, whole or not at all. What it says concerns no other job.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Iterable, Iterator

from limosa.process import device_nodes
from limosa.process.identity import Identity
from limosa.process.namespaces import is_ours
from limosa.process.openat import closing
from limosa.process.slurp import MOST_ENVIRONMENT, lines, slurp
from limosa.process.status import uids_of

_SET = re.compile(rb"(?:\A|\0)LIMOSA_SEES=([^\0]{1,4096})")
_PATH = re.compile(r"(?:/[A-Za-z0-9._-]{1,128}){1,16}/sees/[A-Za-z0-9_-]{1,64}", re.ASCII)
_TEXT = re.compile(rb"[0-9]{1,5}(?:,[0-9]{1,5})*", re.ASCII)
_MOST = 1 << 10
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def file_of(pid: int) -> str:
    """Return the file of a process in another mount namespace, as it is called in there; "" where none hides GPUs.

    Args:
        pid: the process.
    """
    if is_ours(pid, "mnt"):
        return ""
    try:
        found = _SET.search(slurp(f"/proc/{pid}/environ", most=MOST_ENVIRONMENT))
        name = device_nodes.LIBRARY.name.encode()
        if found is None or not any(name in line for line in lines(f"/proc/{pid}/maps", 1 << 17)):
            return ""
        return os.fsdecode(found[1])
    except OSError:
        return ""


def seen(identity: Identity, path: str) -> set[int] | None:
    """Return the minor numbers that a process sees; None where there is no such file, and it sees all.

    Raises:
        OSError: it is none that Limosa would write to.
        LimosaError: the process has gone.
    """
    try:
        with _folder(identity, path) as (folder, uid):
            return _read(folder, os.path.basename(path), uid)
    except FileNotFoundError:
        return None


def refusal(identity: Identity, path: str) -> str:
    """Return why what a process sees cannot be changed, in words; "" where it can."""
    try:
        with _folder(identity, path) as (folder, uid):
            if os.geteuid() not in (0, uid):
                return f"it is for uid {uid} to change"
            _read(folder, os.path.basename(path), uid)
    except FileNotFoundError:
        return ""
    except OSError as error:
        return error.strerror or str(error)
    return ""


def show(identity: Identity, path: str, minors: Iterable[int]) -> None:
    """Change what a process sees; where there is no such file it sees all, and nothing is made.

    Raises:
        OSError: it cannot be.
        LimosaError: the process has gone.
    """
    wanted, name = set(minors), os.path.basename(path)
    with contextlib.suppress(FileNotFoundError), _folder(identity, path) as (folder, uid):
        if _read(folder, name, uid) != wanted:
            device_nodes.write_as(uid, folder, name, wanted)


@contextlib.contextmanager
def _folder(identity: Identity, path: str) -> Iterator[tuple[int, int]]:
    """Open the folder of such a file; whose it has to be, by the process's effective user."""
    if not _PATH.fullmatch(path) or any(part in (".", "..") for part in path.split("/")):
        raise OSError(errno.EINVAL, "it is not called as Limosa calls it", path)
    pid = identity.pid
    with contextlib.ExitStack() as stack:
        at = stack.enter_context(closing(os.open(f"/proc/{pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)))
        uid = uids_of(pid)[1]
        served = _served(pid)
        identity.check()
        above = ""
        for part in path.split("/")[1:-1]:
            above += f"/{part}"
            if above in served:
                raise OSError(errno.EPERM, "it is on a file system that a process serves", path)
            at = stack.enter_context(closing(os.open(part, _FOLDER, dir_fd=at)))
        yield at, uid


def _served(pid: int) -> set[str]:
    """Where file systems are mounted that a process serves (FUSE), which may not answer."""
    found = set()
    for line in slurp(f"/proc/{pid}/mountinfo").split(b"\n"):
        before, _, after = line.partition(b" - ")
        if after.startswith(b"fuse"):
            found.add(os.fsdecode(before.split(b" ")[4]))
    return found


def _read(folder: int, name: str, uid: int) -> set[int]:
    with closing(os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)) as fd:
        found = os.fstat(fd)
        text = os.read(fd, _MOST) if stat.S_ISREG(found.st_mode) and found.st_uid == uid else b"-"
    if not _TEXT.fullmatch(text):
        raise OSError(errno.EPERM, "it is no file of the process's user with numbers of GPUs in it", name)
    return {int(word) for word in text.split(b",")}
