"""Exchanging a container's GPU while its job is checkpointed: the device nodes in its /dev, and what its cgroup allows.

Nothing is noted of what was done. What is there says it: each call makes it as it is wanted, whatever an operation that
was killed has left. First what is to come is added (:func:`add`), and when the job runs there what it has left is taken
away (:func:`leave`), so that it can go back as long as it may have to.

A container's /dev is a folder of its own, on a tmpfs that nothing else is. The container may put there what it likes:
each name is made, looked at and removed in the open folder, no link is followed, and only a node of that very GPU is
ever removed. In a user namespace no node can be made that could be opened: there the machine's own is bound in, as
rootless podman does (``node_mounts.py``).
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress

from limosa.containers import filter as filters
from limosa.containers import node_mounts
from limosa.containers.find import Containers, own_lines
from limosa.process.cgroups import cgroup_folders
from limosa.process.identity import Identity
from limosa.process.namespaces import in_a_thread, is_ours
from limosa.process.openat import closing, last_error, open_in
from limosa.process.slurp import slurp
from limosa.start import file_system

_CLONE_FS = 0x200
_TMPFS = 0x01021994  # statfs(2)
_TRIES = 8
_ALL = {"a *:* rwm", "a *:* rw", "c *:* rwm", "c *:* rw"}
_libc = ctypes.CDLL(None, use_errno=True)


def refusal(pid: int, minors: Collection[int]) -> str:
    """Return why a process's container cannot be given the nodes of these GPUs, in words; "" where it can."""
    if is_ours(pid, "mnt"):
        return "it is in no container: it has the machine's own /dev"
    if os.geteuid():
        return "only root can give a container another GPU"
    try:
        if not is_ours(pid, "user"):
            for minor in minors:
                os.close(node_mounts.taken(f"/dev/{_name(minor)}", _node_here(minor).st_rdev))
        for minor in minors:
            _node_here(minor)
        with _dev_of(Identity.of(pid)):
            pass
        for version, folder in _levels(pid):
            if version == "v2":
                filters.has_filter(folder)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def add(identity: Identity, minors: Collection[int], *, anew: bool = False) -> None:
    """Let a process's container open the GPUs of these minor numbers, besides what it can open.

    Args:
        identity: the process.
        minors: of the GPUs.
        anew: as :func:`leave` has it.

    Raises:
        OSError: it cannot be; what has been added by then stays, for :func:`leave`.
        LimosaError: the process has gone.
    """
    with _dev_of(identity) as dev:
        bound = not is_ours(identity.pid, "user")
        nodes = {minor: _node_here(minor) for minor in minors}
        missing = [minor for minor, node in nodes.items() if not _is_there(dev, minor, node.st_rdev, bound=bound)]
        lacking = {nodes[minor].st_rdev for minor in minors}
        for version, folder in _levels(identity.pid):
            if version == "v1":
                _allow(folder, lacking)
            else:
                filters.change(folder, more={nodes[minor].st_rdev for minor in (minors if anew else missing)})
        for minor in missing:
            if bound:
                node_mounts.bind(identity, dev, _name(minor), nodes[minor].st_rdev)
            else:
                _make(dev, minor, nodes[minor])


def leave(identity: Identity, minors: Collection[int], known: Collection[int], *, anew: bool = False) -> None:
    """Let a process's container open these GPUs alone.

    Args:
        identity: the process.
        minors: of the GPUs that it keeps.
        known: of all GPUs of this machine; other devices are left alone.
        anew: whether its runtime has just made its device cgroup, by a record that may name others than there are
            nodes of.

    Raises:
        OSError: something stays that should go.
        LimosaError: the process has gone.
    """
    with _dev_of(identity) as dev:
        bound = not is_ours(identity.pid, "user")
        gone: dict[int, int] = {}
        others: set[int] = set()
        for minor in set(known) - set(minors):
            with suppress(FileNotFoundError):
                device = _node_here(minor).st_rdev
                if _is_there(dev, minor, device, bound=bound):
                    gone[minor] = device
                others |= {device} if anew else set()
        others |= set(gone.values())
        # The nodes go last: as long as one is there, whoever comes after a kill begins with it again.
        for version, folder in reversed(_levels(identity.pid)):
            if version == "v1":
                _deny(folder, others)
            elif others:
                filters.change(folder, less=others)
        for minor, device in gone.items():
            if bound:
                node_mounts.unbind(identity, dev, _name(minor), device)
            with suppress(FileNotFoundError):
                os.unlink(_name(minor), dir_fd=dev)


# --- nodes ----------------------------------------------------------------------------------------------------


def node_and_number(minor: int) -> tuple[str, int]:
    """Return the path of a GPU's node on this machine, and its device number. OSError: there is none."""
    return f"/dev/{_name(minor)}", _node_here(minor).st_rdev


def _name(minor: int) -> str:
    return f"nvidia{minor}"


def _node_here(minor: int) -> os.stat_result:
    """The machine's own node of a GPU. OSError: there is none."""
    found = os.stat(f"/dev/{_name(minor)}")
    if not stat.S_ISCHR(found.st_mode) or os.minor(found.st_rdev) != minor:
        raise OSError(errno.ENODEV, f"/dev/{_name(minor)} is no device node of that GPU")
    return found


@contextmanager
def _dev_of(identity: Identity) -> Iterator[int]:
    """Open a process's /dev, which must be its container's alone. OSError: it is not."""
    look = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
    with closing(os.open(f"/proc/{identity.pid}/root", look)) as root:
        identity.check()
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        with closing(os.open("dev", flags, dir_fd=root)) as dev:  # a mount, but no link
            found = os.fstat(dev)
            if file_system(dev) != _TMPFS or f"{os.major(found.st_dev)}:{os.minor(found.st_dev)}" in _mounted_here():
                raise OSError(errno.EPERM, "its /dev is not its container's own")
            yield dev


def _mounted_here() -> set[str]:
    """The devices (MAJOR:MINOR) of all file systems that are mounted in the caller's mount namespace."""
    lines = slurp("/proc/self/mountinfo").decode(errors="replace").split("\n")
    return {fields[2] for line in lines if len(fields := line.split(" ")) > 4}


def _is_there(dev: int, minor: int, device: int, *, bound: bool = False) -> bool:
    with suppress(OSError), closing(_opened(dev, minor, bound)) as fd:
        found = os.fstat(fd)
        return stat.S_ISCHR(found.st_mode) and found.st_rdev == device
    return False


def _opened(dev: int, minor: int, bound: bool) -> int:
    """Open a name in a container's /dev; one that is bound in lies on another file system than that."""
    if not bound:
        return open_in(dev, _name(minor), os.O_PATH)
    return os.open(_name(minor), os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dev)


def _make(dev: int, minor: int, like: os.stat_result) -> None:
    def make() -> None:
        if _libc.unshare(_CLONE_FS):  # the mask is this thread's alone
            raise last_error()
        os.umask(0)
        for _ in range(_TRIES):  # the container may put something else there meanwhile
            with suppress(FileExistsError):
                os.mknod(_name(minor), stat.S_IFCHR | stat.S_IMODE(like.st_mode), like.st_rdev, dir_fd=dev)
            if _is_there(dev, minor, like.st_rdev):
                return
            with suppress(FileNotFoundError):
                os.unlink(_name(minor), dir_fd=dev)
        raise OSError(errno.EEXIST, f"something else is at /dev/{_name(minor)} of its container")

    in_a_thread(make)


# --- permissions ----------------------------------------------------------------------------------------------


def _levels(pid: int) -> list[tuple[str, str]]:
    """The cgroups of a process's container that say which devices may be opened, the outermost first.

    Of version 1 those that do not allow everything; of version 2 those that have a program. What is above the
    container's own is others' as well, and stays as it is.
    """
    contained = Containers().of(pid)
    top = contained.cgroup if contained is not None else ""
    text, mounts = os.fsdecode(slurp(f"/proc/{pid}/cgroup")), os.fsdecode(slurp("/proc/self/mountinfo"))
    own = own_lines(text, top) if top else ""
    tops = {folder for _, folder, _ in cgroup_folders(own, mounts, "devices")}
    found: list[tuple[str, str]] = []
    for version, innermost, mount_point in cgroup_folders(text, mounts, "devices"):
        folder, levels = innermost, []
        while folder != mount_point and folder.startswith(f"{mount_point}/"):
            levels.append(folder)
            if folder in tops:
                break
            folder = os.path.dirname(folder)
        else:
            levels = levels[:1]
        for level in reversed(levels):
            if filters.has_filter(level) if version == "v2" else not _ALL & set(_rules(level)):
                found.append((version, level))
    return found


def _rules(folder: str) -> list[str]:
    return slurp(f"{folder}/devices.list").decode().split("\n")


def _rule(device: int) -> str:
    return f"c {os.major(device)}:{os.minor(device)} rwm"


def _allow(folder: str, devices: Collection[int]) -> None:
    for device in devices:
        if not _allows(folder, device):
            _write(f"{folder}/devices.allow", _rule(device))


def _deny(folder: str, devices: Collection[int]) -> None:
    for device in devices:
        if _allows(folder, device):
            _write(f"{folder}/devices.deny", _rule(device))


def _allows(folder: str, device: int) -> bool:
    wanted = {"*:*", f"{os.major(device)}:*", f"{os.major(device)}:{os.minor(device)}"}
    for rule in _rules(folder):
        kind, _, rest = rule.partition(" ")
        numbers, _, access = rest.partition(" ")
        if kind in ("a", "c") and numbers in wanted and {"r", "w"} <= set(access):
            return True
    return False


def _write(path: str, text: str) -> None:
    with closing(os.open(path, os.O_WRONLY | os.O_CLOEXEC)) as fd:
        os.write(fd, text.encode())


def numbers(nodes: Mapping[str, int], uuids: Collection[str]) -> list[int]:
    """Return the minor numbers of GPUs by UUID."""
    return [nodes[uuid] for uuid in uuids if uuid in nodes]
