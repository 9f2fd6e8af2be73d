"""Makes the calling process the first one of a node, or lets programs join a node that another process holds.

A node is a mount namespace whose /dev is a tmpfs: everything of the machine's /dev is there again but its NVIDIA
devices and its /dev/shm, and in their place those of the node, and the folder that the two libraries share. It takes up
nothing outside of the namespace, and is gone with the last process in it. Process ids, the network, /run and files are
the machine's.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import glob
import os
import stat
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from limosa.errors import GpuUnavailable, NoSuchProcess, PermissionDenied, UsageError
from limosa.process.launch import log_folder, log_place, refuse_other_names
from limosa.process.openat import closing
from limosa.start import changeable
from limosa_softgpu import build, kernel, loader
from limosa_softgpu.spec import NodeSpec
from limosa_softgpu.state import NODE_FOLDER, NodeState, open_file, open_folder, opened

# A number that no driver has: nothing can be opened by these nodes by mistake. What a job holds open of them is a name.
MAJOR = 4000
ZERO = (1, 5)
_MOUNT = "softgpu-node"  # by what name the node's folder is mounted: root joins no other
_NS_GET_USERNS = 0xB701  # ioctl_ns(2)
# What programs load a driver by, and where drivers put it: some programs load it from there by its full name.
_DRIVER = {alias: name for name in build.LIBRARIES for alias in (name, name.rpartition(".")[0])}
_DRIVER_FOLDERS = (
    "/usr/lib/*-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/nvidia/lib64",
    "/usr/local/cuda*/compat",
    "/usr/lib/wsl/lib",
)
_SHM = "/dev/shm"  # noqa: S108 - the folder itself is what is made here


def check_libraries(folder: Path = build.SOFTGPU) -> None:
    """Look whether the libraries are there, and build them where they are not (no compiler when Limosa was installed).

    Raises:
        GpuUnavailable: they are not and cannot be built; or, for root, others can change them.
    """
    libraries = [folder / name for name in build.LIBRARIES]
    if not all(library.is_file() for library in libraries):
        problem = build.build_softgpu(folder)
        if problem is not None:
            raise GpuUnavailable(
                detail=f"the software GPU cannot be built: {problem}", hint="install a C compiler (gcc) and try again"
            )
    for library in libraries:
        if why := changeable(library):
            raise GpuUnavailable(detail=f"root loads no {library.name}: {why}", hint="chown root:, chmod go-w")


def environment(base: Mapping[str, str] | None = None, folder: Path = build.SOFTGPU) -> dict[str, str]:
    """Return an environment in which programs find the software GPU's libraries before any other."""
    env = dict(os.environ if base is None else base)
    others = [part for part in env.get("LD_LIBRARY_PATH", "").split(":") if part and part != str(folder)]
    env["LD_LIBRARY_PATH"] = ":".join([str(folder), *others])
    return env


def inside(pid: int | str = "self") -> bool:
    """Return whether a process (this one by default) is in a node."""
    return os.path.exists(f"/proc/{pid}/root{NODE_FOLDER}/state")


def enter(spec: NodeSpec) -> None:
    """Make a node and put this process (and what it starts from now on) into it.

    The caller must have one thread, and is never outside again.

    Raises:
        UsageError: the file for the log cannot be written to.
        PermissionDenied: making mounts and device nodes is not permitted.
        GpuUnavailable: the libraries have not been built, or the kernel refused for another reason.
    """
    check_libraries()
    if os.geteuid() != 0:
        raise PermissionDenied(
            detail="a node of software GPUs has mounts and device nodes of its own, which only root can make",
            hint="use sudo",
        )
    log = -1
    try:
        kernel.unshare(kernel.CLONE_NEWNS)
        kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
        log = _open_log(spec.log)
        _make_dev()
        _make_nodes(spec)
        _make_folder(spec, log)
        _cover_driver()
        _lead_loader()
    except PermissionError as error:
        raise PermissionDenied(
            detail=f"a node of software GPUs has mounts and device nodes of its own ({error})",
            hint="give the container the capabilities SYS_ADMIN and MKNOD",
        ) from error
    except OSError as error:
        raise GpuUnavailable(detail=f"the node cannot be made: {error}") from error
    finally:
        if log >= 0:
            os.close(log)
    for fd in (0, 1, 2):
        _reopen(fd)


def join(pid: int) -> None:
    """Put this process into the node that another process is in. The caller must have one thread.

    It stays in the folder that it is in, and where it was if it is refused.

    Raises:
        OSError: there is no such process, or it is not permitted.
        UsageError: it is in no node, or our folder is not to be found in that.
    """
    look = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
    with (
        closing(os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)) as fd,
        closing(os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)) as ours,
        closing(os.open("/proc/self", look)) as proc,
        closing(os.open("/", look)) as root,
        closing(os.open(".", look)) as folder,
    ):
        # Whoever makes a user namespace of his own lays what he likes over any program's name in it.
        with closing(fcntl.ioctl(fd, _NS_GET_USERNS)) as owner:
            if not os.path.samestat(os.fstat(owner), os.stat("/proc/self/ns/user")):
                raise PermissionError(errno.EPERM, "its mounts are a user's own")
        try:
            cwd = os.getcwd()
        except OSError as error:
            raise UsageError(detail="the folder that this is called in has no name any more") from error
        try:
            kernel.setns(fd, kernel.CLONE_NEWNS)  # it also goes to the namespace's root folder
            # A user's process can have a folder of his for its root, a container's has other programs.
            if not (_is_node(proc) and os.path.samestat(os.stat("/"), os.fstat(root))):
                raise UsageError(detail=f"process {pid} is in no node of software GPUs")
            _return_to(cwd, folder)
        except BaseException:
            # Nothing is loaded where others may have put it, not even to say what is wrong.
            kernel.setns(ours, kernel.CLONE_NEWNS)
            os.fchdir(root)
            os.chroot(".")
            os.fchdir(folder)
            raise
    for standard in (0, 1, 2):
        _reopen(standard)


def _is_node(proc: int) -> bool:
    """Whether this process is in a node now; ``proc``: its folder in a /proc that we trust.

    Others can make a file of that name, but no mount of it.
    """
    try:
        with open_folder() as folder:
            found = os.fstat(folder)
            os.close(open_file(folder, "state", os.O_RDONLY))
        with open(os.open("mountinfo", os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc), "rb") as file:
            mounts = [line.split(b" ") for line in file.read().split(b"\n")]
    except OSError:
        return False
    device = f"{os.major(found.st_dev)}:{os.minor(found.st_dev)}".encode()
    wanted = [device, b"/", NODE_FOLDER.encode()], [b"tmpfs", _MOUNT.encode()]
    return found.st_uid == 0 and any((mount[2:5], mount[-3:-1]) == wanted for mount in mounts)


def _return_to(cwd: str, folder: int) -> None:
    """Go to our folder by its name, which a user may have given to another one meanwhile.

    Raises:
        UsageError: there it is not.
    """
    with suppress(OSError):
        os.chdir(cwd)
        if os.path.samestat(os.stat("."), os.fstat(folder)):
            return
    raise UsageError(detail=f"{cwd} is another folder in the node, or none", hint="call it in another folder, e.g. /")


def join_node(pid: int) -> None:
    """Put this process into the node that a process is in.

    Raises:
        NoSuchProcess: there is no such process.
        UsageError: it is in no node, or our folder is not to be found in that.
        PermissionDenied: only root may enter a mount namespace.
    """
    try:
        if not inside(pid):
            os.stat(f"/proc/{pid}/root")
            raise UsageError(detail=f"process {pid} is in no node of software GPUs")
        join(pid)
    except FileNotFoundError:
        raise NoSuchProcess(pid=pid) from None
    except PermissionError as error:
        raise PermissionDenied(detail=f"cannot enter the node of process {pid} ({error})", hint="use sudo") from error


def _make_dev() -> None:
    """Lay a tmpfs over /dev in which everything of the old one is again."""
    old = os.open("/dev", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        here = os.fstat(old).st_dev
        kernel.mount("softgpu-dev", "/dev", "tmpfs", kernel.MS_NOSUID, "mode=755,size=16m,nr_inodes=0")
        for name in sorted(os.listdir(old)):
            if not name.startswith("nvidia") and name != "shm":
                _again(old, name, here)
        os.mkdir(_SHM)
        kernel.mount("softgpu-shm", _SHM, "tmpfs", kernel.MS_NOSUID, "mode=1777")
    finally:
        os.close(old)


def _again(old: int, name: str, here: int) -> None:
    """Bring one entry of the old /dev into the new one; what cannot be had (it has gone meanwhile) is left out."""
    source, target = f"/proc/self/fd/{old}/{name}", f"/dev/{name}"
    try:
        info = os.stat(name, dir_fd=old, follow_symlinks=False)
        if stat.S_ISLNK(info.st_mode):
            os.symlink(os.readlink(name, dir_fd=old), target)
            return
        if stat.S_ISDIR(info.st_mode):
            os.mkdir(target)
            kernel.mount(source, target, None, kernel.MS_BIND | kernel.MS_REC)
            return
        # A device that is mounted by itself is more than its number: a container's console is a terminal of another
        # file system.
        if info.st_dev == here and (stat.S_ISCHR(info.st_mode) or stat.S_ISBLK(info.st_mode)):
            with suppress(PermissionError):
                _device(target, stat.S_IFMT(info.st_mode), info.st_rdev, stat.S_IMODE(info.st_mode))
                os.chown(target, info.st_uid, info.st_gid)
                return
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        kernel.mount(source, target, None, kernel.MS_BIND)
    except FileNotFoundError:
        pass


def _device(path: str, kind: int, number: int, mode: int = 0o666) -> None:
    """Make a device node of exactly that mode."""
    os.mknod(path, kind | mode, number)
    os.chmod(path, mode)


def _make_nodes(spec: NodeSpec) -> None:
    for minor in range(len(spec.gpus)):
        _device(f"/dev/nvidia{minor}", stat.S_IFCHR, os.makedev(MAJOR, minor))
    # Processes map these two: they are /dev/zero under the names that are to be read in /proc.
    for name in ("nvidiactl", "nvidia-uvm"):
        _device(f"/dev/{name}", stat.S_IFCHR, os.makedev(*ZERO))


def _open_log(path: str) -> int:
    """Open the file that is to be the node's log, while its name is the machine's; -1 for none."""
    if not path:
        return -1
    flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    new = False
    try:
        place = log_place(path)
        with log_folder(place) as folder:
            try:
                fd, new = os.open(place.name, flags | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=folder), True
            except FileExistsError:
                fd = os.open(place.name, flags, dir_fd=folder)
            try:
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    raise OSError(errno.EINVAL, "this is not a file")
                refuse_other_names(fd, place.name, folder)
            except BaseException:
                os.close(fd)
                raise
    except OSError as error:
        raise UsageError(detail=f"--log {path}: {error.strerror}") from error
    if new:
        os.fchmod(fd, 0o666)  # whoever fails in the node writes there
    return fd


def _make_folder(spec: NodeSpec, log: int) -> None:
    """Make the node's folder; everybody in the node may write there, as with the device nodes."""
    os.mkdir(NODE_FOLDER)
    # More than most of the machine's memory can be promised, but not taken: the rest of the machine has to live.
    room = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * 4 // 5
    kernel.mount(_MOUNT, NODE_FOLDER, "tmpfs", kernel.MS_NOSUID, f"mode=1777,size={room},nr_inodes=0")
    for name in ("memory", "requests", "faults", "nccl"):
        os.mkdir(f"{NODE_FOLDER}/{name}")
        os.chmod(f"{NODE_FOLDER}/{name}", 0o777)
    for name, size in (("state", ctypes.sizeof(NodeState)), ("lock", 0), ("log", 0)):
        fd = os.open(f"{NODE_FOLDER}/{name}", os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o666)
        os.fchmod(fd, 0o666)
        os.ftruncate(fd, size)
        os.close(fd)
    if log >= 0:
        kernel.mount(f"/proc/self/fd/{log}", f"{NODE_FOLDER}/log", None, kernel.MS_BIND)
    with opened() as state:
        spec.fill(state)
    if spec.faults:
        from limosa_softgpu.faults import Switches

        switches = Switches()
        for rule in spec.faults:
            switches.add(rule)


def _cover_driver(folders: Sequence[str] = _DRIVER_FOLDERS) -> None:
    """Bind our libraries over those of a driver that this machine has: in the node there is no other way to it."""
    found = {
        os.path.realpath(f"{folder}/{alias}"): name
        for pattern in folders
        for folder in glob.glob(pattern)
        for alias, name in _DRIVER.items()
    }
    found |= {os.path.realpath(path): _DRIVER[alias] for alias, path in loader.listed(_DRIVER)}
    for path, name in found.items():
        ours = str(build.SOFTGPU / name)
        if os.path.isfile(path) and not os.path.samefile(path, ours):
            kernel.mount(ours, path, None, kernel.MS_BIND)


def _lead_loader() -> None:
    """Let the dynamic loader find our libraries where nobody tells it: ``env -i``, sudo, a job that clears its own.

    Where the machine's loader has no cache, or one of another format, LD_LIBRARY_PATH is all there is.
    """
    mine = f"{NODE_FOLDER}/ld.so.cache"
    try:
        with open(loader.CACHE, "rb") as file:
            cache = file.read()
        made = loader.with_libraries(cache, {name: str(build.SOFTGPU / ours) for name, ours in _DRIVER.items()})
    except (OSError, ValueError):
        return
    with open(mine, "wb") as file:
        file.write(made)
    os.chmod(mine, 0o644)
    kernel.mount(mine, loader.CACHE, None, kernel.MS_BIND)


def _reopen(fd: int) -> None:
    """Open a standard stream again by its name.

    What was opened outside lies on mounts of the machine's namespace, and CRIU in the node could not say where that is.
    Pipes and sockets are on no mount. A file with an offset of its own would lose what it shares with whoever else
    writes to it, so only appending ones are done.
    """
    try:
        path = os.readlink(f"/proc/self/fd/{fd}")
        info = os.fstat(fd)
        flags = os.O_NOCTTY | _flags(fd)
        appending = stat.S_ISREG(info.st_mode) and flags & os.O_APPEND
        if not path.startswith("/") or not (stat.S_ISCHR(info.st_mode) or appending):
            return
        # Looked at before it is opened: its folder may be another user's, who has put a pipe or a link there meanwhile.
        with closing(os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)) as looked:
            found = os.fstat(looked)
            same = (
                (found.st_dev, found.st_ino) == (info.st_dev, info.st_ino)
                if appending
                else stat.S_ISCHR(found.st_mode) and found.st_rdev == info.st_rdev
            )
            if same:
                with closing(os.open(f"/proc/self/fd/{looked}", flags | os.O_CLOEXEC)) as new:
                    os.dup2(new, fd)
    except OSError:
        pass  # it is closed, or has no name here: it stays as it is


def _flags(fd: int) -> int:
    import fcntl

    return fcntl.fcntl(fd, fcntl.F_GETFL) & (os.O_ACCMODE | os.O_APPEND | os.O_NONBLOCK)


def run_here(command: list[str], env: Mapping[str, str] | None = None) -> None:
    """Become a program of the node: never returns.

    Raises:
        OSError: it cannot be started.
    """
    import signal

    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores
        signal.signal(number, signal.SIG_DFL)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvpe(command[0], command, environment(env))  # noqa: S606 - what was asked for
