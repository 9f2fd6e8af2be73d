"""What was seen of a job: plain records, filled by :mod:`limosa.process.observe`, judged by ``hazards``.

They go to JSON and back unchanged (``to_json`` / ``from_json``), so that a recording of a real job is a test's input.
Fields have defaults so that a test can make an observation of three lines, and old recordings go on loading.
Sizes are bytes throughout.
"""

from __future__ import annotations

import msgspec

from limosa.structs import ready


class Peer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A process that holds the other end, or another descriptor or mapping, of something the job uses.

    Attributes:
        pid: the process.
        name: its name (``comm``).
        fd: the descriptor by which it holds it; -1 where it is a mapping.
        access: "r", "w" or "rw"; "" where it cannot be told.
    """

    pid: int
    name: str = ""
    fd: int = -1
    access: str = ""


class ThreadObservation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A thread: id, name (15 characters at most) and state letter (proc(5))."""

    tid: int
    name: str = ""
    state: str = "S"


class MapObservation(msgspec.Struct, kw_only=True, omit_defaults=True):
    """All mappings of one file (or special thing) in one process, merged.

    Attributes:
        path: as in ``/proc/PID/maps``, without `` (deleted)``; "" never occurs (plain anonymous memory is left out).
        inode: 0 for special mappings such as ``[heap]``.
        dev: "major:minor" in hexadecimal, as in ``maps``.
        shared: whether any of them is MAP_SHARED.
        bytes: address space, summed.
        count: how many mappings were merged.
        deleted: the name is gone (always so for memfd, SysV and anonymous shared memory).
        size: bytes of a file whose name is gone; None where it has a name or could not be asked.
        links: names that such a file still has elsewhere.
        peers: processes outside the tree that map or hold it; looked for only where it is shared, and
            without a name or in /dev/shm.
    """

    path: str
    inode: int = 0
    dev: str = "00:00"
    shared: bool = False
    bytes: int = 0
    count: int = 1
    deleted: bool = False
    size: int | None = None
    links: int = 0
    peers: list[Peer] = msgspec.field(default_factory=list)

    @property
    def named_shm(self) -> bool:
        """Whether it is named shared memory (shm_overview(7)), the driver's own not counted: it makes that anew."""
        folder, _, name = self.path.rpartition("/")
        return self.shared and not self.deleted and folder == "/dev/shm" and not name.startswith("cuda.")  # noqa: S108


class FdObservation(msgspec.Struct, kw_only=True, omit_defaults=True):
    """An open descriptor.

    Attributes:
        fd: its number.
        target: what ``/proc/PID/fd/N`` points to, without `` (deleted)``.
        kind: "file", "dir", "pipe", "fifo", "socket", "memfd", "pty" (a slave or master), "tty" (other terminals),
            "device", "block", "eventfd", "epoll", "io_uring", "inotify", "fanotify", "signalfd", "timerfd", "pidfd",
            "mqueue", "secretmem", "namespace", "path" (O_PATH), "anon" (another anonymous inode, named in ``target``).
        flags: open flags as in ``fdinfo`` (O_APPEND, O_WRONLY, …).
        position: file offset.
        size: bytes of a file or memfd; None for anything else.
        inode: inode number.
        links: names left (0: the file was deleted).
        deleted: the name it was opened by is gone.
        dev: "major:minor", decimal, of the file system.
        device: "major:minor", decimal, of the device a device node stands for; "".
        mount_id: ``mnt_id`` of fdinfo; -1 where unknown.
        mounted: whether that mount is in the process's mountinfo.
        locks: the ``lock:`` lines of fdinfo (file locks and leases).
        tty_index: number of the pty that a master belongs to; -1.
        watched_pid: the process that a pidfd is of, or that a file under ``/proc/PID`` tells of while it lives; 0.
        in_proc: where the file is on a procfs, its path there ("4711/statm", "meminfo"); "".
        peers: for pipes and ptys every other holder outside of the tree; for memfds likewise.
    """

    fd: int
    target: str
    kind: str = "file"
    flags: int = 0
    position: int = 0
    size: int | None = None
    inode: int = 0
    links: int = 1
    deleted: bool = False
    dev: str = ""
    device: str = ""
    mount_id: int = -1
    mounted: bool = True
    locks: list[str] = msgspec.field(default_factory=list)
    tty_index: int = -1
    watched_pid: int = 0
    in_proc: str = ""
    peers: list[Peer] = msgspec.field(default_factory=list)


class SocketObservation(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A socket that a descriptor of the process refers to.

    Attributes:
        fd: the descriptor (each descriptor has an entry of its own).
        inode: the socket.
        family: "unix", "inet", "inet6", "netlink", "packet", or the kernel's name in lower case ("vsock", "alg"),
            "unknown".
        type: "stream", "dgram", "seqpacket", "raw".
        protocol: "tcp", "udp", "udplite", "raw", "icmp", "".
        state: "listen", "established", "syn-sent", "close", … ; unix sockets: "listen", "established", "close".
        local: "address:port", "[v6]:port", a path, "@abstract" or "".
        remote: likewise; for unix sockets the path of the peer.
        peer_inode: socket at the other end where it is in the same network namespace (or any, for unix); 0.
        peer_pids: processes that hold that socket, ascending; empty where none or not visible.
        peers: the same as records with names and descriptors.
        holders: processes outside the tree that hold this very socket (inherited).
        pending: of a listening unix socket, processes that have connected and wait to be accepted.
        pending_inodes: their sockets.
        peer_known: False where the kernel could not be asked (no sock_diag) who the peer is.
        queued: unaccepted connections of a listening socket.
    """

    fd: int
    inode: int
    family: str = "unix"
    type: str = "stream"
    protocol: str = ""
    state: str = "established"
    local: str = ""
    remote: str = ""
    peer_inode: int = 0
    peer_pids: list[int] = msgspec.field(default_factory=list)
    peers: list[Peer] = msgspec.field(default_factory=list)
    holders: list[Peer] = msgspec.field(default_factory=list)
    pending: list[Peer] = msgspec.field(default_factory=list)
    pending_inodes: list[int] = msgspec.field(default_factory=list)
    peer_known: bool = True
    queued: int = 0


class CgroupObservation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A memory cgroup with a limit (the tightest one above a process).

    Attributes:
        path: folder under /sys/fs/cgroup, as Limosa sees it.
        limit_bytes: its limit; None without one.
        used_bytes: what counts against it, page cache that can be dropped (inactive_file) taken off.
    """

    path: str = ""
    limit_bytes: int | None = None
    used_bytes: int = 0

    @property
    def room(self) -> int | None:
        """Bytes left below the limit; None without one."""
        return None if self.limit_bytes is None else max(0, self.limit_bytes - self.used_bytes)


class SysvObservation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A System V IPC object that the process uses.

    Attributes:
        kind: "shm", "msg" or "sem".
        id: its id.
        evidence: "attached", "last sender", "last receiver", "creator's user".
        certain: False where the evidence is circumstantial (semaphores name no process).
    """

    kind: str
    id: int
    evidence: str = "attached"
    certain: bool = True


class ProcessObservation(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One process of the job. ``start_time`` is in clock ticks since boot; the rest as in proc(5).

    Attributes:
        command: the argument vector.
        state: state letter of the main thread.
        maps: file-backed and special mappings, merged per file.
        n_maps: lines of ``maps``.
        n_uvm_maps: mappings of /dev/nvidia-uvm (a plain CUDA process has one for each GPU with a context).
        n_managed_maps: those of them that are managed memory.
        has_libcuda: libcuda is mapped.
        namespaces: "pid", "mnt", "net", "user", "ipc", "uts", "cgroup", "time" → inode.
        cgroup: the memory cgroup with the least room.
        cgroup_levels: every memory cgroup above the process that has a limit.
        rss_anon, shm_bytes, swap_bytes: resident anonymous memory, resident shared memory, memory swapped out.
        env: only RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT, CUDA_*, NCCL_* … (see observe.ENVIRONMENT).
        frozen: the frozen cgroup that it is in; "".
        pid_inside: its pid in its own pid namespace.
        cwd, file_root: working directory and root directory.
        seccomp: 0 none, 1 strict, 2 filter.
        unreadable: what could not be read for want of permission: "maps", "fd", "environ", ….
    """

    pid: int
    ppid: int = 0
    start_time: int = 0
    uid: int = 0
    gid: int = 0
    name: str = ""
    command: list[str] = msgspec.field(default_factory=list)
    exe: str = ""
    state: str = "S"
    n_threads: int = 1
    tracer_pid: int = 0
    tracer_name: str = ""
    sid: int | None = None
    pgid: int = 0
    tty_nr: int = 0
    pid_inside: int = 0
    frozen: str = ""
    cwd: str = ""
    file_root: str = "/"
    threads: list[ThreadObservation] = msgspec.field(default_factory=list)
    maps: list[MapObservation] = msgspec.field(default_factory=list)
    n_maps: int = 0
    n_uvm_maps: int = 0
    n_managed_maps: int = 0
    has_libcuda: bool = False
    fds: list[FdObservation] = msgspec.field(default_factory=list)
    sockets: list[SocketObservation] = msgspec.field(default_factory=list)
    namespaces: dict[str, int] = msgspec.field(default_factory=dict)
    cgroup: CgroupObservation = CgroupObservation()
    cgroup_levels: list[CgroupObservation] = msgspec.field(default_factory=list)
    rss_anon: int = 0
    shm_bytes: int = 0
    swap_bytes: int = 0
    env: dict[str, str] = msgspec.field(default_factory=dict)
    sysv_ipc: list[SysvObservation] = msgspec.field(default_factory=list)
    seccomp: int = 0
    unreadable: list[str] = msgspec.field(default_factory=list)

    @property
    def title(self) -> str:
        """How the process is called in sentences: ``4711 (python)``."""
        return f"{self.pid} ({self.name})" if self.name else str(self.pid)


class HostObservation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The machine and Limosa itself.

    Attributes:
        mem_total, mem_available: bytes, from /proc/meminfo.
        uid, gid: effective ids of Limosa.
        ptrace_scope: /proc/sys/kernel/yama/ptrace_scope; 0 where there is no Yama.
        caps: effective capabilities, the bit mask CapEff.
        namespaces: Limosa's own, as in :class:`ProcessObservation`.
        ancestors: Limosa's own pid and its ancestors'.
        hidden_processes: processes whose descriptors could not be looked at (other users', without root).
        crowded_processes: of these, those that have too many to be looked at.
    """

    mem_total: int = 0
    mem_available: int = 0
    uid: int = 0
    gid: int = 0
    ptrace_scope: int = 0
    caps: int = 0
    namespaces: dict[str, int] = msgspec.field(default_factory=dict)
    ancestors: list[int] = msgspec.field(default_factory=list)
    hidden_processes: int = 0
    crowded_processes: int = 0


class JobObservation(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A whole job: root first, each parent before its children.

    Attributes:
        seconds: how long the looking took.
    """

    root: int
    processes: list[ProcessObservation]
    host: HostObservation = HostObservation()
    seconds: float = 0.0

    @property
    def pids(self) -> set[int]:
        """The pids of the tree."""
        return {process.pid for process in self.processes}

    def process(self, pid: int) -> ProcessObservation:
        """Return the record of one process of the tree.

        Raises:
            KeyError: it is not in the tree.
        """
        for process in self.processes:
            if process.pid == pid:
                return process
        raise KeyError(pid)

    def to_json(self) -> bytes:
        """Return the observation as JSON."""
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, data: bytes | str) -> JobObservation:
        """Read what :meth:`to_json` wrote.

        Raises:
            msgspec.ValidationError: it is something else.
        """
        return msgspec.json.decode(data, type=ready(cls))
