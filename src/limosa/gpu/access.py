"""Which GPUs a job can open: its own view of ``/dev``, not CUDA_VISIBLE_DEVICES and not Limosa's view.

A GPU's device node is ``/dev/nvidia<minor>`` with NVML's minor number. Major numbers differ between drivers and mean
nothing here. A node can be missing (container), covered by another file (a bind mount), or forbidden by its mode or by
the job's device cgroup.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Sequence
from pathlib import Path

import msgspec

from limosa.errors import NoSuchProcess, PermissionDenied
from limosa.gpu.gpus import Gpu, Inventory

_CAP_DAC_OVERRIDE = 1
_SYS_OPENAT2 = 437  # openat2(2), the same on every architecture
_NO_MAGICLINKS, _IN_ROOT = 0x02, 0x10
_libc = ctypes.CDLL(None, use_errno=True)


class Credentials(msgspec.Struct, frozen=True):
    """What decides whether a process may open a file: user, groups, and the capability to pass over modes."""

    uid: int
    groups: frozenset[int]
    override: bool

    @classmethod
    def of(cls, pid: int) -> Credentials:
        """Read them from ``/proc/PID/status`` (file system uid and gid, groups, effective capabilities).

        Raises:
            NoSuchProcess: there is no such process.
        """
        fields: dict[str, list[str]] = {}
        try:
            # Its name may have any line end in it but this one, which the kernel escapes.
            with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace", newline="\n") as file:
                for line in file:
                    key, _, value = line.partition(":")
                    fields[key] = value.split()
        except (FileNotFoundError, ProcessLookupError):
            raise NoSuchProcess(pid=pid) from None
        groups = {int(fields["Gid"][3]), *(int(group) for group in fields.get("Groups", []))}
        override = bool(int(fields["CapEff"][0], 16) >> _CAP_DAC_OVERRIDE & 1)
        return cls(int(fields["Uid"][3]), frozenset(groups), override)

    def may_open(self, info: os.stat_result) -> bool:
        """Return whether the mode lets these credentials open a file for reading and writing."""
        if self.override:
            return True
        if info.st_uid == self.uid:
            bits = info.st_mode >> 6
        elif info.st_gid in self.groups:
            bits = info.st_mode >> 3
        else:
            bits = info.st_mode
        return bits & 6 == 6


def openable(inventory: Inventory, pid: int) -> list[Gpu]:
    """Return the GPUs whose device nodes a process can open.

    Args:
        inventory: the GPUs of this machine.
        pid: the process; its own mount namespace is looked at through ``/proc/PID/root``.

    Returns:
        In NVML's order. GPUs of which NVML tells no minor number are left out.

    Raises:
        NoSuchProcess: there is no such process.
        PermissionDenied: ``/proc/PID/root`` may not be looked into.
    """
    credentials = Credentials.of(pid)
    root = Path(f"/proc/{pid}/root")
    try:
        root.joinpath("dev").stat()
    except PermissionError:
        raise PermissionDenied(
            detail=f"/proc/{pid}/root belongs to somebody else, so its GPUs cannot be known", pid=pid
        ) from None
    except FileNotFoundError:
        if not os.path.exists(f"/proc/{pid}"):
            raise NoSuchProcess(pid=pid) from None
        return []
    return openable_under(inventory.gpus, root, credentials, device_rules(pid))


def opened(inventory: Inventory, pid: int) -> list[Gpu]:
    """Return the GPUs whose device nodes a process holds open: what it could open for sure.

    Evidence beside :func:`openable`, which cannot see a version 2 device cgroup: a running CUDA process that holds
    fewer than it seems to be able to open is under one, or has CUDA_VISIBLE_DEVICES set.

    Args:
        inventory: the GPUs of this machine.
        pid: the process.

    Raises:
        NoSuchProcess: there is no such process.
        PermissionDenied: its descriptors may not be looked at.
    """
    names: set[str] = set()
    try:
        for entry in os.listdir(f"/proc/{pid}/fd"):
            try:
                names.add(os.path.basename(os.readlink(f"/proc/{pid}/fd/{entry}")))
            except FileNotFoundError:
                continue  # closed meanwhile
    except (FileNotFoundError, ProcessLookupError):
        raise NoSuchProcess(pid=pid) from None
    except PermissionError:
        raise PermissionDenied(detail=f"the descriptors of process {pid} may not be looked at", pid=pid) from None
    return [gpu for gpu in inventory.gpus if gpu.minor is not None and f"nvidia{gpu.minor}" in names]


def openable_under(
    gpus: Sequence[Gpu], root: Path, credentials: Credentials, rules: Sequence[str] | None = None
) -> list[Gpu]:
    """The decision of :func:`openable` for a given root folder.

    Args:
        gpus: in the order of the answer.
        root: the folder that holds ``dev``.
        credentials: whose access is asked for.
        rules: lines of the device cgroup's ``devices.list`` (version 1), None where there is none.
    """
    found = []
    try:
        folder = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return []
    try:
        nodes = {gpu.minor: _stat_under(folder, f"dev/nvidia{gpu.minor}") for gpu in gpus if gpu.minor is not None}
    finally:
        os.close(folder)
    for gpu in gpus:
        info = nodes.get(gpu.minor) if gpu.minor is not None else None
        if info is None:
            continue
        # A node may be covered by an empty file or by /dev/null: it must be a device, with that minor number.
        if not stat.S_ISCHR(info.st_mode) or os.minor(info.st_rdev) != gpu.minor or info.st_rdev == _null():
            continue
        if credentials.may_open(info) and (rules is None or allowed_by(rules, info.st_rdev)):
            found.append(gpu)
    return found


class _How(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


def _stat_under(root: int, path: str) -> os.stat_result | None:
    """What a path means to whoever has an open folder for its root: no link of a container's leads out of that."""
    how = _How(os.O_PATH | os.O_CLOEXEC, 0, _IN_ROOT | _NO_MAGICLINKS)
    arguments = (ctypes.c_int(root), ctypes.c_char_p(os.fsencode(path)), ctypes.byref(how))
    fd = int(_libc.syscall(ctypes.c_long(_SYS_OPENAT2), *arguments, ctypes.c_size_t(ctypes.sizeof(how))))
    if fd >= 0:
        try:
            return os.fstat(fd)
        finally:
            os.close(fd)
    if ctypes.get_errno() != errno.ENOSYS:  # before Linux 5.6
        return None
    try:
        return os.stat(path, dir_fd=root, follow_symlinks=False)
    except OSError:
        return None


def allowed_by(rules: Sequence[str], device: int) -> bool:
    """Return whether the lines of a ``devices.list`` (``c 195:0 rw``, ``a *:* rwm``) let a device be opened.

    Args:
        rules: the lines.
        device: ``st_rdev`` of the node.
    """
    for rule in rules:
        parts = rule.split()
        if len(parts) != 3:
            continue
        kind, numbers, access = parts
        major, _, minor = numbers.partition(":")
        if (
            kind in "ac"
            and major in ("*", str(os.major(device)))
            and minor in ("*", str(os.minor(device)))
            and {"r", "w"} <= set(access)
        ):
            return True
    return False


def device_rules(pid: int) -> list[str] | None:
    """Return what the device cgroup (version 1) allows a process, None where there is none that can be read.

    Version 2 has a program in the kernel in its place that cannot be read: there the nodes decide alone.
    """
    try:
        with open(f"/proc/{pid}/cgroup", encoding="utf-8", errors="surrogateescape", newline="\n") as file:
            for line in file:
                _, controllers, path = line.rstrip("\n").split(":", 2)
                if "devices" in controllers.split(","):
                    with open(f"/sys/fs/cgroup/devices{path.rstrip('/')}/devices.list", encoding="utf-8") as rules:
                        return rules.read().splitlines()
    except OSError:
        pass
    return None


def _null() -> int:
    """Return the device number of /dev/null, with which nodes are covered (also /dev/nvidia3: minor 3)."""
    try:
        return os.stat("/dev/null").st_rdev
    except OSError:
        return -1
