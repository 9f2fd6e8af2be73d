"""Reading one process from ``/proc`` into a :class:`ProcessObservation`.

psutil is not used here: it answers per question, and a PyTorch tree with thousands of mappings would be read several
times over; one pass over each file keeps a whole tree under a few dozen milliseconds.
"""

from __future__ import annotations

import errno
import os
import re

import msgspec

from limosa.process.cgroups import frozen_by, memory_levels, tightest
from limosa.process.identity import Identity, Stat, read_stat
from limosa.process.observation import MapObservation, ProcessObservation, ThreadObservation
from limosa.process.slurp import MOST, MOST_COMMAND, MOST_ENVIRONMENT, TooLong, head, lines, slurp
from limosa.process.status import status_of

ENVIRONMENT = re.compile(
    rb"(?<![^\0])(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT|TORCHELASTIC_RUN_ID"
    rb"|CUDA_VISIBLE_DEVICES|CUDA_DEVICE_ORDER|CUDA_MPS_[A-Z_]*|CUDA_MODULE_LOADING|NCCL_P2P_DISABLE"
    rb"|NCCL_SHM_DISABLE|LD_PRELOAD)=([^\0]*)"
)
_MOST_VALUE = 4096
"""Of a variable: more is neither shown nor decides anything."""
NAMESPACES = ("pid", "mnt", "net", "user", "ipc", "uts", "cgroup", "time")
_DELETED = " (deleted)"
# Shared memory without a name of its own: CRIU writes its content itself, so its size is no ghost file's.
ANONYMOUS_SHARED = ("/dev/zero", "/memfd:", "/SYSV", "/[aio]", "/secretmem", "[anon_shmem:")


def namespaces(folder: str) -> dict[str, int]:
    """Return the namespaces that ``/proc/PID`` is in, name → inode; those that cannot be read are left out."""
    found = {}
    for name in NAMESPACES:
        try:
            found[name] = os.stat(f"{folder}/ns/{name}").st_ino
        except OSError:
            continue
    return found


_UVM_OWN, _UVM_LOW = 2 << 20, 1 << 36
"""The driver's own mapping of /dev/nvidia-uvm, one a GPU with a context: 2 MiB at a low address (0x204a00000; driver
580). Managed memory lies among the libraries, at 0x7f…, in a mapping a region."""


class Maps(msgspec.Struct):
    """The mappings of a process."""

    merged: list[MapObservation]
    lines: int
    uvm: int
    managed: int
    libcuda: bool


def place_of(stat: Stat) -> str:
    """Return the folder under ``/proc`` that shows a process's files: its own, or a living thread's.

    When the main thread has ended while others go on, ``/proc/PID/fd`` and ``maps`` are empty and theirs are not.
    """
    folder = f"/proc/{stat.pid}"
    if stat.state == "Z":
        for name in os.listdir(f"{folder}/task"):
            if name != str(stat.pid):
                return f"{folder}/task/{name}"
    return folder


def read_maps(folder: str) -> Maps:
    """Read ``maps`` and merge it by file.

    Args:
        folder: ``/proc/PID``.

    Raises:
        TooLong: the files that are mapped have longer names than can be kept.
        OSError: it cannot be read (another user's process), or the process is gone.
    """
    merged: dict[bytes, MapObservation] = {}
    ranges: dict[bytes, bytes] = {}
    found, uvm, managed, libcuda, kept = 0, 0, 0, False, 0
    for line in lines(f"{folder}/maps", 1 << 17):
        found += 1
        fields = line.split(None, 5)
        if len(fields) < 6:
            continue
        span, permissions, _, dev, inode, name = fields
        low, _, high = span.partition(b"-")
        first_byte = int(low, 16)
        size = int(high, 16) - first_byte
        if name == b"/dev/nvidia-uvm" and not (size == _UVM_OWN and first_byte < _UVM_LOW):
            managed += 1
        key = name + b"\0" + inode  # two deleted files may have had the same name
        known = merged.get(key)
        if known is not None:
            known.bytes += size
            known.count += 1
            known.shared = known.shared or permissions[3:4] == b"s"
            continue
        if (kept := kept + len(name)) > MOST:
            raise TooLong(errno.EFBIG, f"the names in it have more than {MOST} bytes", f"{folder}/maps")
        path = name.decode(errors="surrogateescape").replace("\\012", "\n")
        deleted = path.endswith(_DELETED)
        merged[key] = MapObservation(
            path=path[: -len(_DELETED)] if deleted else path,
            inode=int(inode),
            dev=dev.decode(),
            shared=permissions[3:4] == b"s",
            bytes=size,
            deleted=deleted,
        )
        if deleted:
            ranges[key] = span
    for key, entry in merged.items():
        if entry.path == "/dev/nvidia-uvm":
            uvm += entry.count
        elif "libcuda.so" in entry.path:
            libcuda = True
        if key in ranges and not entry.path.startswith(ANONYMOUS_SHARED):
            try:
                first, _, last = ranges[key].partition(b"-")
                info = os.stat(f"{folder}/map_files/{int(first, 16):x}-{int(last, 16):x}")
                entry.size, entry.links = info.st_size, info.st_nlink
            except OSError:
                entry.size = entry.bytes  # without the right to ask: what is mapped is the best guess
    return Maps(list(merged.values()), found, uvm, managed, libcuda)


def _threads(pid: int) -> list[ThreadObservation]:
    found = []
    for name in os.listdir(f"/proc/{pid}/task"):
        try:
            raw = slurp(f"/proc/{pid}/task/{name}/stat")
        except OSError:
            continue  # a thread that ended meanwhile
        closing = raw.rindex(b")")
        comm = raw[raw.index(b"(") + 1 : closing].decode(errors="replace")
        found.append(ThreadObservation(tid=int(name), name=comm, state=chr(raw[closing + 2])))
    return found


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def read_process(identity: Identity, mountinfo: str, sight: Stat | None = None) -> ProcessObservation:
    """Read everything of a process but its descriptors (:mod:`limosa.process.descriptors`).

    Args:
        identity: the process.
        mountinfo: the text of Limosa's own ``/proc/self/mountinfo``.
        sight: its ``stat`` where that was read already.

    Returns:
        The record; ``unreadable`` names what was refused for want of permission.

    Raises:
        NoSuchProcess: it has gone.
        FileNotFoundError, ProcessLookupError: it went while it was read.
    """
    pid = identity.pid
    stat = sight or read_stat(pid)
    folder = place_of(stat)
    status = status_of(pid)
    uid, gid = int(status["Uid"][1]), int(status["Gid"][1])
    seen = ProcessObservation(
        pid=pid,
        ppid=stat.ppid,
        start_time=stat.start_time,
        uid=uid,
        gid=gid,
        name=stat.name,
        command=[part.decode(errors="replace") for part in head(f"{folder}/cmdline", MOST_COMMAND).split(b"\0")[:-1]],
        exe=_link(f"{folder}/exe"),
        state=stat.state,
        n_threads=stat.n_threads,
        tracer_pid=int(status["TracerPid"][0]),
        sid=stat.sid,
        pgid=stat.pgid,
        tty_nr=stat.tty_nr,
        pid_inside=int(status.get("NSpid", [str(pid)])[-1]),
        cwd=_link(f"{folder}/cwd"),
        file_root=_link(f"{folder}/root"),
        threads=_threads(pid),
        namespaces=namespaces(folder),
        seccomp=int(status.get("Seccomp", ["0"])[0]),
    )
    if seen.tracer_pid:
        seen.tracer_name = _link(f"/proc/{seen.tracer_pid}/exe").rpartition("/")[2]
    for key, field in (("RssAnon", "rss_anon"), ("RssShmem", "shm_bytes"), ("VmSwap", "swap_bytes")):
        if key in status:
            setattr(seen, field, int(status[key][0]) * 1024)
    try:
        maps = read_maps(folder)
        seen.maps, seen.n_maps, seen.has_libcuda = maps.merged, maps.lines, maps.libcuda
        seen.n_uvm_maps, seen.n_managed_maps = maps.uvm, maps.managed
    except PermissionError:
        seen.unreadable.append("maps")
    try:
        environment = slurp(f"{folder}/environ", most=MOST_ENVIRONMENT)
        for match in ENVIRONMENT.finditer(environment):
            seen.env[match[1].decode()] = match[2][:_MOST_VALUE].decode(errors="replace")
    except PermissionError:
        seen.unreadable.append("environ")
    try:
        cgroups = slurp(f"/proc/{pid}/cgroup").decode(errors="replace")
        seen.cgroup_levels, seen.frozen = memory_levels(cgroups, mountinfo), frozen_by(cgroups, mountinfo)
    except OSError:
        seen.unreadable.append("cgroup")
    seen.cgroup = tightest(seen.cgroup_levels)
    return seen
