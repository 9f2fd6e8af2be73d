"""Looking at a job from outside: :func:`observe` reads ``/proc`` and the kernel's socket tables, nothing else.

Nothing here waits for the job: no signal, no ptrace, no driver call. It takes some tens of milliseconds.
"""

from __future__ import annotations

import os
import time

from limosa.errors import NoSuchProcess
from limosa.process.candidates import candidates
from limosa.process.descriptors import Mount, read_descriptors, read_mounts
from limosa.process.identity import Identity, ancestors, read_stat
from limosa.process.memory import host_memory
from limosa.process.observation import (
    CgroupObservation,
    FdObservation,
    HostObservation,
    JobObservation,
    MapObservation,
    Peer,
    ProcessObservation,
    SocketObservation,
    SysvObservation,
    ThreadObservation,
)
from limosa.process.peers import Found, Wanted, look
from limosa.process.procfs import namespaces, place_of, read_process
from limosa.process.slurp import slurp
from limosa.process.sockets import Table, protocol_name, read_table
from limosa.process.status import effective_capabilities
from limosa.process.sysv import read_sysv
from limosa.process.tree import job_tree

__all__ = [
    "CgroupObservation",
    "FdObservation",
    "HostObservation",
    "JobObservation",
    "MapObservation",
    "Peer",
    "ProcessObservation",
    "SocketObservation",
    "SysvObservation",
    "ThreadObservation",
    "candidates",
    "observe",
    "observe_host",
]


_TRIES = 3


def observe_host(hidden: int = 0, crowded: int = 0) -> HostObservation:
    """Return what matters of the machine and of Limosa itself.

    Args:
        hidden: processes whose descriptors could not be read.
        crowded: of these, those that have too many.
    """
    total, available = host_memory()
    try:
        with open("/proc/sys/kernel/yama/ptrace_scope", encoding="ascii") as file:
            scope = int(file.read())
    except OSError:
        scope = 0  # no Yama: nothing beyond the classic rules
    return HostObservation(
        mem_total=total,
        mem_available=available,
        uid=os.geteuid(),
        gid=os.getegid(),
        ptrace_scope=scope,
        caps=effective_capabilities(),
        namespaces=namespaces("/proc/self"),
        ancestors=[os.getpid(), *(identity.pid for identity in ancestors())],
        hidden_processes=hidden,
        crowded_processes=crowded,
    )


def _read_tree(root: Identity) -> list[ProcessObservation]:
    mountinfo = os.fsdecode(slurp("/proc/self/mountinfo"))
    mounts_of: dict[int, dict[int, Mount]] = {}
    processes = []
    for identity in job_tree(root):
        try:
            sight = read_stat(identity.pid)
            seen, folder = read_process(identity, mountinfo, sight), place_of(sight)
            try:
                view = seen.namespaces.get("mnt", -identity.pid)
                if view not in mounts_of:
                    mounts_of[view] = read_mounts(folder)
                seen.fds = read_descriptors(folder, mounts_of[view])
            except PermissionError:
                seen.unreadable.append("fd")
            identity.check()  # else it may be another process's files that were just read
        except (NoSuchProcess, FileNotFoundError, ProcessLookupError):
            if identity == root:
                root.check()
                raise NoSuchProcess(pid=root.pid) from None
            continue  # a child that ended while we looked is no part of the job any more
        processes.append(seen)
    return processes


# The kernel's names (/proc/net/protocols) of sockets that are in no table while they are not bound or connected.
_UNBOUND = {
    "tcp": ("inet", "tcp"),
    "tcpv6": ("inet6", "tcp"),
    "udp": ("inet", "udp"),
    "udpv6": ("inet6", "udp"),
    "raw": ("inet", "raw"),
    "rawv6": ("inet6", "raw"),
    "udp-lite": ("inet", "udplite"),
    "udplitev6": ("inet6", "udplite"),
    "ping": ("inet", "icmp"),
    "pingv6": ("inet6", "icmp"),
    "unix": ("unix", ""),
    "unix-stream": ("unix", ""),
}


def _sockets(processes: list[ProcessObservation]) -> None:
    """Fill ``sockets`` from the tables of the network namespaces; who holds the peers is filled in later."""
    tables: dict[int, Table] = {}
    for process in processes:
        for fd in process.fds:
            if fd.kind != "socket":
                continue
            view = process.namespaces.get("net", -process.pid)
            if view not in tables:
                tables[view] = read_table(process.pid)
            seen = SocketObservation(fd=fd.fd, inode=fd.inode, family="unknown", type="", state="close")
            entry = tables[view].entries.get(fd.inode)
            if entry is not None:
                seen.family, seen.type, seen.protocol, seen.state = (
                    entry.family,
                    entry.type,
                    entry.protocol,
                    entry.state,
                )
                seen.local, seen.remote = entry.local, entry.remote
                seen.peer_inode, seen.peer_known = tables[view].peer_of(entry), entry.peer_known
                seen.queued, seen.pending_inodes = entry.queued, entry.pending
            else:
                name = protocol_name(process.pid, fd.fd).lower()
                if not _still(process.pid, fd):
                    continue  # closed between the two looks
                seen.family, seen.protocol = _UNBOUND.get(name, (name.removeprefix("af_") or "unknown", ""))
            process.sockets.append(seen)


def _still(pid: int, fd: FdObservation) -> bool:
    """Return whether a descriptor is still what it was."""
    try:
        return os.readlink(f"/proc/{pid}/fd/{fd.fd}") == fd.target
    except OSError:
        return False


def _wanted(processes: list[ProcessObservation]) -> Wanted:
    """Return what other processes might hold together with the job."""
    wanted = Wanted()
    for process in processes:
        for fd in process.fds:
            if fd.kind == "pipe":
                wanted.targets.add(fd.target)
            elif fd.kind == "pty" and fd.tty_index >= 0:
                wanted.targets.add(f"/dev/pts/{fd.tty_index}")
            elif fd.kind == "pty":
                number = fd.target.rpartition("/")[2]
                if number.isascii() and number.isdigit():
                    wanted.masters.add(int(number))
            elif fd.kind == "memfd":
                major, _, minor = fd.dev.partition(":")
                wanted.memory.add((os.makedev(int(major), int(minor)), fd.inode))
        for seen in process.sockets:
            wanted.targets.add(f"socket:[{seen.inode}]")
            wanted.targets.update(f"socket:[{inode}]" for inode in (seen.peer_inode, *seen.pending_inodes) if inode)
        for mapping in process.maps:
            if _may_have_peers(mapping):
                wanted.memory.add(_memory_key(mapping))
    return wanted


def _nameless_shared(mapping: MapObservation) -> bool:
    return mapping.shared and (mapping.deleted or mapping.path.startswith("[anon_shmem:")) and (
        not mapping.path.startswith("/SYSV")  # told apart in sysv_ipc
    )  # fmt: skip


def _may_have_peers(mapping: MapObservation) -> bool:
    return _nameless_shared(mapping) or mapping.named_shm


def _memory_key(mapping: MapObservation) -> tuple[int, int]:
    major, _, minor = mapping.dev.partition(":")
    return os.makedev(int(major, 16), int(minor, 16)), mapping.inode


def _hand_out(processes: list[ProcessObservation], found: Found) -> None:
    """Write the peers that were found to the descriptors, sockets and mappings they belong to."""
    inside: dict[int, list[Peer]] = {}
    for process in processes:
        for fd in process.fds:
            if fd.kind == "socket":
                inside.setdefault(fd.inode, []).append(Peer(pid=process.pid, name=process.name, fd=fd.fd, access="rw"))
    for process in processes:
        for fd in process.fds:
            fd.peers = _peers_of(fd, found)
        for seen in process.sockets:
            seen.holders = found.targets.get(f"socket:[{seen.inode}]", [])
            if seen.peer_inode:
                outside = found.targets.get(f"socket:[{seen.peer_inode}]", [])
                seen.peers = [*inside.get(seen.peer_inode, []), *outside]
                seen.peer_pids = sorted({peer.pid for peer in seen.peers})
            for inode in seen.pending_inodes:
                seen.pending.extend([*inside.get(inode, []), *found.targets.get(f"socket:[{inode}]", [])])
        for mapping in process.maps:
            if _may_have_peers(mapping):
                mapping.peers = found.memory.get(_memory_key(mapping), [])


def _peers_of(fd: FdObservation, found: Found) -> list[Peer]:
    """Who else has what a descriptor leads to."""
    if fd.kind == "pipe":
        return found.targets.get(fd.target, [])
    if fd.kind == "pty" and fd.tty_index >= 0:
        return found.targets.get(f"/dev/pts/{fd.tty_index}", [])
    if fd.kind == "pty":
        number = fd.target.rpartition("/")[2]
        return found.masters.get(int(number), []) if number.isascii() and number.isdigit() else []
    if fd.kind == "memfd":
        major, _, minor = fd.dev.partition(":")
        return found.memory.get((os.makedev(int(major), int(minor)), fd.inode), [])
    return []


def observe(root: Identity) -> JobObservation:
    """Look at a job: its whole tree, what it holds, and who else holds the same.

    Args:
        root: the job's first process.

    Returns:
        The observation. What could not be read for want of permission is named in each process's ``unreadable``
        (``common_hazards`` makes a refusal of it); children that end meanwhile are left out.

    Raises:
        NoSuchProcess, Zombie, PidReused: the root is not (or no longer) what it was.
        PermissionDenied: ``/proc`` hides the root altogether.
    """
    begin = time.perf_counter()
    for _ in range(_TRIES):
        observation, newborn = _look_once(root)
        if not newborn and not _unsettled(observation):
            break
    observation.seconds = time.perf_counter() - begin
    return observation


def _look_once(root: Identity) -> tuple[JobObservation, bool]:
    """Return what was seen, and whether the tree has grown meanwhile by somebody who shares something with it."""
    processes = _read_tree(root)
    _sockets(processes)
    read_sysv(processes)
    found = look(_wanted(processes), [process.pid for process in processes])
    _hand_out(processes, found)
    for process in processes:
        if process.tracer_pid and not process.tracer_name:
            try:
                process.tracer_name = read_stat(process.tracer_pid).name
            except NoSuchProcess:
                pass
    host = observe_host(found.hidden, found.crowded)
    return JobObservation(root=root.pid, processes=processes, host=host), found.newborn


def _unsettled(observation: JobObservation) -> bool:
    """Return whether a socket was seen whose kind or other end nobody seems to have.

    That is what a connection looks like that was made or closed between two of the looks (DataLoader workers do so all
    the time), unless there are processes that may not be looked into.
    """
    return observation.host.hidden_processes == 0 and any(
        socket.family == "unknown" or (socket.peer_inode and not socket.peers)
        for process in observation.processes
        for socket in process.sockets
    )
