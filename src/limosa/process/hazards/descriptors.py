"""Descriptors and mappings that CRIU cannot dump by themselves: io_uring, devices, odd anonymous inodes, terminals."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator

from limosa.errors import Reason
from limosa.process.observation import FdObservation, JobObservation, MapObservation, ProcessObservation

SEMAPHORE_LIMIT = 4096  # bytes; the C library's has 32
_RUN = "start the job with limosa run"
# anon inodes and special kinds that CRIU 4.2.1 dumps and restores; each was tried.
_DUMPED = {"eventfd", "epoll", "inotify", "fanotify", "signalfd", "timerfd", "memfd", "namespace", "path"}
_ANON_WORDS = {
    "[userfaultfd]": "a userfaultfd",
    "[perf_event]": "a performance counter",
    "bpf-map": "a BPF map",
    "bpf-prog": "a BPF program",
    "[fscontext]": "a file system context",
    "[infinibandevent]": "an InfiniBand event channel",
    "kvm-vm": "a virtual machine",
}


def terminals(obs: JobObservation) -> list[tuple[ProcessObservation, FdObservation]]:
    """Return the descriptors that are terminals of somebody outside.

    That is a pty whose master is not in the tree, also where the process has it as /dev/tty, and the console or virtual
    terminal that it was started from. Another of these is opened anew; one that was hung up comes back hung up.
    """
    masters = {fd.tty_index for p in obs.processes for fd in p.fds if fd.kind == "pty" and fd.tty_index >= 0}
    return [(process, fd) for process in obs.processes for fd in process.fds if _is_terminal(obs, process, fd, masters)]


def _is_terminal(obs: JobObservation, process: ProcessObservation, fd: FdObservation, masters: set[int]) -> bool:
    number = fd.target.rpartition("/")[2]
    if fd.deleted:
        return False  # its master is closed: who left it behind (a login that ended) has no part in it any more
    if fd.kind == "tty":
        major, minor = (int(part) for part in (fd.device or "0:0").split(":"))
        own = os.major(process.tty_nr), os.minor(process.tty_nr)
        if (major, minor) == (5, 0):  # /dev/tty: whatever the process was started from
            return not (136 <= own[0] <= 143 and (own[0] - 136) * 256 + own[1] in masters)
        lent = (major, minor) == own and process.sid not in obs.pids  # by a session that is not the job's
        return lent or not ((major, minor) == (5, 1) or (major == 4 and minor < 64))
    return (
        fd.kind == "pty" and fd.tty_index < 0 and number.isascii() and number.isdigit() and int(number) not in masters
    )


def descriptor_hazards(obs: JobObservation) -> list[Reason]:
    """Return the descriptors and mappings that CRIU cannot dump, each kind once for a process.

    Returns:
        ``io-uring``, ``anonymous-inode``, ``device``, ``pidfd-outside``, ``message-queue``, ``unmounted-file``,
        ``program-path`` (13).
    """
    found: list[Reason] = []
    programs = {process.exe for process in obs.processes}
    for process in obs.processes:
        found += _io_uring(process)
        for fd in process.fds:
            reason = _descriptor(process, fd, obs) or _path_of_program(process, fd, programs)
            if reason is not None:
                found.append(reason)
        for mapping in process.maps:
            reason = _mapping(process, mapping)
            if reason is not None:
                found.append(reason)
    return found


def _io_uring(process: ProcessObservation) -> Iterator[Reason]:
    fds = [str(fd.fd) for fd in process.fds if fd.kind == "io_uring"]
    mapped = any("[io_uring]" in mapping.path for mapping in process.maps)
    if fds or mapped:
        what = f"descriptor {', '.join(fds)}" if fds else "a mapping"
        yield Reason(
            id="io-uring",
            text=f"{what} of process {process.title} is an io_uring, which CRIU cannot dump",
            exit_code=13,
            hint=f"{_RUN}, or its container with limosa.dev/job=shim: libuv and torchrun fall back to epoll",
            pid=process.pid,
        )


def _descriptor(process: ProcessObservation, fd: FdObservation, obs: JobObservation) -> Reason | None:
    where = f"descriptor {fd.fd} of process {process.title}"
    if fd.kind in _DUMPED:
        return None
    if fd.kind in ("anon", "secretmem"):
        name = fd.target.removeprefix("anon_inode:")
        what = _ANON_WORDS.get(name, fd.target)
        return _refuse("anonymous-inode", f"{where} is {what}, which CRIU cannot dump", "", process)
    if fd.kind == "pidfd" and fd.watched_pid > 0 and fd.watched_pid not in obs.pids:
        text = f"{where} watches process {fd.watched_pid}, which is not part of the job (a pidfd)"
        return _refuse("pidfd-outside", text, "", process)
    if fd.kind == "mqueue":
        text = f"{where} is the POSIX message queue {fd.target}, which CRIU cannot dump"
        return _refuse("message-queue", text, "use another kind of queue (multiprocessing's is fine)", process)
    # In a mount namespace of its own (refused as such) what it inherited is on mounts that it does not see.
    own = obs.host.namespaces.get("mnt", 0)
    if not fd.mounted and process.namespaces.get("mnt", own) == own:
        text = f"{where} is {fd.target} on a file system that is no longer (or not here) mounted"
        way_out = "start the job where that is mounted (limosa run opens its output itself)"
        return _refuse("unmounted-file", text, way_out, process)
    if fd.kind in ("device", "block") and not fd.target.startswith("/dev/nvidia"):
        # Major 1 are the memory devices (null, zero, full, random, urandom, kmsg): all were tried.
        if fd.kind == "device" and fd.device.partition(":")[0] == "1":
            return None
        return _refuse("device", f"{where} is the device {fd.target}, which CRIU cannot dump", "", process)
    if fd.kind == "tty" and fd.device.partition(":")[0] == "4" and int(fd.device.partition(":")[2] or 0) >= 64:
        return _refuse("device", f"{where} is the serial line {fd.target}, which CRIU cannot dump", _RUN, process)
    return None


def _path_of_program(process: ProcessObservation, fd: FdObservation, programs: Collection[str]) -> Reason | None:
    """CRIU takes such a descriptor for the program's own file as well, and cannot start it by that (measured)."""
    if fd.kind != "path" or fd.target not in programs:
        return None
    text = f"descriptor {fd.fd} of process {process.title} is a path (O_PATH) to the program {fd.target} of the job, "
    return _refuse("program-path", text + "which CRIU cannot restore", "open it to read", process)


def _mapping(process: ProcessObservation, mapping: MapObservation) -> Reason | None:
    path = mapping.path
    if path.startswith("/secretmem"):
        text = f"process {process.title} maps secret memory (memfd_secret), which CRIU cannot dump"
        return _refuse("anonymous-inode", text, "", process)
    if path.startswith(("anon_inode:", "/dmabuf:")) and "[io_uring]" not in path:
        return _refuse("anonymous-inode", f"process {process.title} maps {path}, which CRIU cannot dump", "", process)
    harmless = ("/dev/zero", "/dev/shm/", "/dev/nvidia", "/dev/hugepages/", "/dev/mqueue/")  # noqa: S108
    if path.startswith("/dev/") and not path.startswith(harmless):
        return _refuse("device", f"process {process.title} maps the device {path}, which CRIU cannot dump", "", process)
    return None


def _refuse(id_: str, text: str, hint: str, process: ProcessObservation) -> Reason:
    return Reason(id=id_, text=text, exit_code=13, hint=hint, pid=process.pid)


def locked_files(process: ProcessObservation) -> list[FdObservation]:
    """Return the descriptors that hold file locks when CRIU looks: the driver's own are gone by then."""
    return [fd for fd in process.fds if fd.locks and not fd.target.startswith("/dev/nvidia")]


def mapped_locks(process: ProcessObservation) -> list[Reason]:
    """Return what CRIU alone would lose: POSIX locks on files that the process has mapped as well.

    Returns:
        ``mapped-locks`` (13).
    """
    mapped = {m.inode for m in process.maps if m.inode}
    lost = [fd for fd in locked_files(process) if fd.inode in mapped and any(" POSIX " in lock for lock in fd.locks)]
    if not lost:
        return []
    text = (
        f"process {process.title} holds POSIX locks on {lost[0].target}, which it has mapped as well: CRIU loses them"
    )
    return [_refuse("mapped-locks", text, "Limosa's CRIU plugin keeps them, on x86-64: limosa doctor --fix", process)]


def renamed_files(process: ProcessObservation) -> dict[str, FdObservation | MapObservation]:
    """Return the files that lost the name they were opened by and have another: that name → how the process has it.

    A named semaphore is such a file, mapped and not open (``sem_open`` makes it under another name for a moment).
    """
    found: dict[str, FdObservation | MapObservation] = {m.path: m for m in process.maps if m.deleted and m.links > 0}
    files = (fd for fd in process.fds if fd.kind == "file" and fd.deleted and fd.links > 0)
    return found | {fd.target: fd for fd in files}


def is_semaphore(name: str, had: FdObservation | MapObservation) -> bool:
    """Return whether that is a named semaphore, which an image has in it: a small file in /dev/shm that is mapped."""
    small = isinstance(had, MapObservation) and had.size is not None and had.size <= SEMAPHORE_LIMIT
    return small and os.path.dirname(name) == "/dev/shm"  # noqa: S108 - sem_overview(7)


def file_hazards(process: ProcessObservation, *, file_locks: bool, link_remap: bool) -> list[Reason]:
    """Return what stands against dumping a process's regular files without the options that allow it.

    Returns:
        ``file-locks``, ``link-remap`` (13).
    """
    found = []
    locked = locked_files(process)
    if locked and not file_locks:
        names = ", ".join(f"{fd.target} (descriptor {fd.fd})" for fd in locked[:3])
        text = f"process {process.title} holds locks on {names}"
        found.append(
            Reason(
                id="file-locks",
                text=text,
                exit_code=13,
                hint="--file-locks, if nobody else waits for them",
                pid=process.pid,
            )
        )
    if not link_remap:
        for name, had in renamed_files(process).items():
            if is_semaphore(name, had):
                continue
            how = f"descriptor {had.fd}" if isinstance(had, FdObservation) else "a mapping"
            found.append(
                Reason(
                    id="link-remap",
                    text=f"{how} of process {process.title} is {name}, whose name is gone; it has others",
                    exit_code=13,
                    hint="--link-remap, for an image that is restored once and ends the job",
                    pid=process.pid,
                )
            )
    return found
