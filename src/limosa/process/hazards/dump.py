"""What CRIU cannot dump, or could not bring back as it was; measured with CRIU 4.2.1 (see ``docs/refusals.md``)."""

from __future__ import annotations

import platform
from collections.abc import Collection

import msgspec

from limosa.errors import Reason
from limosa.process.hazards.common import may_trace_anyone, more_rights
from limosa.process.hazards.connections import connection_hazards, has_connections
from limosa.process.hazards.descriptors import descriptor_hazards, file_hazards, locked_files, mapped_locks, terminals
from limosa.process.hazards.proc_files import proc_hazards
from limosa.process.hazards.shared import shared_hazards
from limosa.process.observation import JobObservation, ProcessObservation

_CAP_SYS_RESOURCE = 1 << 24
GHOST_LIMIT = 1 << 20  # CRIU's own default for --ghost-limit


class CheckpointNeeds(msgspec.Struct, frozen=True, kw_only=True):
    """What CRIU has to be told for this job beyond what the user asked for; none of it needs anybody's permission.

    Attributes:
        tcp_established: the tree has connections; where both ends are inside, keeping them is no question.
        shell_job: the root is not the leader of its session, and no terminal is involved.
        ghost_limit: size in bytes of the largest file without a name that is open or mapped, at least CRIU's default.
        file_locks: file locks are held.
    """

    tcp_established: bool = False
    shell_job: bool = False
    ghost_limit: int = GHOST_LIMIT
    file_locks: bool = False


def nameless_files(process: ProcessObservation) -> dict[str, int]:
    """Return the regular files of a process that have no name left at all: name they had → size in bytes."""
    found: dict[str, int] = {}
    for fd in process.fds:
        if fd.kind == "file" and fd.deleted and fd.links == 0 and fd.mounted:
            found[fd.target] = max(found.get(fd.target, 0), fd.size or 0)
    for mapping in process.maps:
        if mapping.deleted and mapping.size is not None and mapping.links == 0:
            found[mapping.path] = max(found.get(mapping.path, 0), mapping.size)
    return found


def checkpoint_needs(obs: JobObservation) -> CheckpointNeeds:
    """Return what CRIU has to be told for this job beyond the user's options."""
    sizes = [size for process in obs.processes for size in nameless_files(process).values()]
    # A file may grow between this look and the dump.
    largest = max(sizes, default=0)
    return CheckpointNeeds(
        tcp_established=has_connections(obs),
        shell_job=not leads_session(obs) and not terminals(obs),
        ghost_limit=max(GHOST_LIMIT, largest + largest // 4),
        file_locks=any(locked_files(process) for process in obs.processes),
    )


def leads_session(obs: JobObservation) -> bool:
    """Return whether the job's root leads its session, which CRIU wants without ``--shell-job``."""
    root = obs.process(obs.root)
    return root.sid is None or root.sid == root.pid


def checkpoint_hazards(  # noqa: PLR0913 - options are keywords
    obs: JobObservation,
    *,
    tcp_established: bool = False,
    tcp_close: bool = False,
    shell_job: bool = False,
    file_locks: bool = False,
    ghost_limit: int | None = None,
    link_remap: bool = False,
    skip_in_flight: bool = False,
    ext_unix_sk: bool = False,
    plugin: bool = True,
    cuda_pids: Collection[int] = (),
) -> list[Reason]:
    """Return what stands against dumping a job with CRIU.

    Args:
        obs: the job.
        tcp_established: connections to processes outside may be kept in the image.
        tcp_close: they may be brought back closed.
        shell_job: the job may use a terminal, or be in somebody else's session.
        file_locks: file locks may be kept.
        ghost_limit: the user's cap on files without a name, bytes; None for none.
        link_remap: files that lost the name they were opened by but have another may get one of CRIU's; semaphores need
            none.
        skip_in_flight: TCP connections that the job has not accepted may be left out.
        ext_unix_sk: datagram unix sockets may be connected anew to the name outside that they send to.
        plugin: our CRIU plugin is there.
        cuda_pids: processes that hold CUDA state (their device mappings go away with the driver's checkpoint).

    Returns:
        Reasons; see ``docs/refusals.md`` for every id.
    """
    found: list[Reason] = []
    found += _tracing(obs)
    found += _limits(obs)
    found += _namespaces(obs)
    found += _session(obs, shell_job)
    for process in obs.processes:
        if process.state == "Z":
            found.append(
                Reason(
                    id="main-thread-ended",
                    text=f"the main thread of process {process.title} has ended while others go on, which CRIU cannot "
                    "dump",
                    exit_code=13,
                    pid=process.pid,
                )
            )
        found += _sysv(process)
        if not plugin and process.pid not in cuda_pids:
            found += _inherited(process)
        cap = ghost_limit
        for name, size in nameless_files(process).items():
            if cap is not None and size > cap:
                found.append(
                    Reason(
                        id="deleted-file",
                        text=f"process {process.title} uses the deleted file {name} of {size} bytes, more than the "
                        f"{cap} that --ghost-limit allows into the image",
                        exit_code=13,
                        hint=f"--ghost-limit {size}",
                        pid=process.pid,
                    )
                )
        if file_locks and not (plugin and platform.machine() == "x86_64"):
            found += mapped_locks(process)
        found += file_hazards(process, file_locks=file_locks, link_remap=link_remap)
    found += descriptor_hazards(obs)
    found += proc_hazards(obs)
    found += shared_hazards(obs)
    found += connection_hazards(
        obs,
        tcp_established=tcp_established,
        tcp_close=tcp_close,
        skip_in_flight=skip_in_flight,
        ext_unix_sk=ext_unix_sk,
    )
    return found


def _tracing(obs: JobObservation) -> list[Reason]:
    found = []
    for process in obs.processes:
        if process.tracer_pid:
            found.append(
                Reason(
                    id="debugger",
                    text=f"process {process.title} is traced by process {process.tracer_pid} ({process.tracer_name}); "
                    "CRIU cannot attach beside it",
                    exit_code=13,
                    hint="detach the debugger (gdb: detach; strace: Ctrl-C)",
                    pid=process.pid,
                )
            )
    scope = obs.host.ptrace_scope
    if (scope == 3 or (scope > 0 and not may_trace_anyone(obs))) and obs.host.ancestors:
        found.append(
            Reason(
                id="ptrace-scope",
                text=f"kernel.yama.ptrace_scope is {scope}, which keeps CRIU from attaching to process {obs.root}",
                exit_code=11,
                hint=more_rights(obs) if scope < 3 else "only a reboot can lower it",
                pid=obs.root,
            )
        )
    return found


def _limits(obs: JobObservation) -> list[Reason]:
    """prlimit(2): CRIU reads the limits of each process, and sets them at a restore."""
    others = [p for p in obs.processes if (p.uid, p.gid) != (obs.host.uid, obs.host.gid)]
    if not others or obs.host.uid != 0 or obs.host.caps & _CAP_SYS_RESOURCE:  # others are refused as ``wrong-user``
        return []
    return [
        Reason(
            id="resource-limits",
            text=f"process {others[0].title} belongs to user {others[0].uid}, group {others[0].gid}: without "
            "CAP_SYS_RESOURCE CRIU cannot read its limits",
            exit_code=11,
            hint="give limosa CAP_SYS_RESOURCE (docker run --cap-add SYS_RESOURCE), or run it as that user",
            pid=others[0].pid,
            forceable=True,
        )
    ]


def _namespaces(obs: JobObservation) -> list[Reason]:
    found: list[Reason] = []
    root, own = obs.process(obs.root), obs.host.namespaces

    def differs(name: str) -> bool:
        return name in own and name in root.namespaces and own[name] != root.namespaces[name]

    def refuse(id_: str, text: str, process: ProcessObservation) -> None:
        hint = "run limosa inside the job's container"
        found.append(Reason(id=id_, text=text, exit_code=13, hint=hint, pid=process.pid, forceable=True))

    if differs("user"):
        refuse("user-namespace", f"process {root.title} is in a user namespace; CRIU can dump and not restore it", root)
    if differs("mnt"):
        text = f"process {root.title} is in another mount namespace, which CRIU does not bring back as it was"
        refuse("mount-namespace", text, root)
    if differs("pid") and root.pid_inside != 1:
        text = f"process {root.title} is in another pid namespace without being its first process"
        refuse("pid-namespace", text, root)
    for process in obs.processes[1:]:
        for name in ("pid", "mnt", "net", "user", "ipc", "uts"):
            if process.namespaces.get(name, 0) != root.namespaces.get(name, 0) and name in process.namespaces:
                text = f"process {process.title} is in another {name} namespace than the job's root {root.title}"
                refuse("nested-namespace", text, process)
                break
    return found


def _session(obs: JobObservation, shell_job: bool) -> list[Reason]:
    for process in obs.processes:
        # The kernel says 0 for a session led from outside the pid namespace, and CRIU has no option for that.
        if process.sid == 0:
            return [
                Reason(
                    id="session-outside",
                    text=f"process {process.title} belongs to a session that is led from outside of its pid namespace, "
                    "which CRIU cannot dump",
                    exit_code=13,
                    hint="start the job with limosa run or setsid, or run limosa outside of this container",
                    pid=process.pid,
                )
            ]
    if shell_job:
        return []
    root = obs.process(obs.root)
    at_terminal = terminals(obs)
    if at_terminal:
        process, fd = at_terminal[0]
        return [
            Reason(
                id="terminal",
                text=f"descriptor {fd.fd} of process {process.title} is the terminal {fd.target}"
                + (f" of process {fd.peers[0].pid} ({fd.peers[0].name})" if fd.peers else ""),
                exit_code=13,
                hint="--shell-job (and restore from a terminal), or start the job with limosa run",
                pid=process.pid,
            )
        ]
    if not leads_session(obs):
        return [
            Reason(
                id="session",
                text=f"process {root.title} belongs to the session of process {root.sid}, which is not part of the "
                "job; after a restore it will be in the session of whoever restored it",
                hint="limosa run gives a job a session of its own",
                pid=root.pid,
            )
        ]
    return []


def _sysv(process: ProcessObservation) -> list[Reason]:
    found = []
    for item in process.sysv_ipc:
        word = {"shm": "shared memory segment", "msg": "message queue", "sem": "semaphore set"}[item.kind]
        if item.certain:
            found.append(
                Reason(
                    id="sysv-ipc",
                    text=f"process {process.title} uses the System V {word} {item.id}, which CRIU cannot dump",
                    exit_code=13,
                    hint="start the job in an IPC namespace of its own: unshare --ipc",
                    pid=process.pid,
                    forceable=item.kind != "shm",
                )
            )
        else:
            found.append(
                Reason(
                    id="sysv-semaphores",
                    text=f"the System V {word} {item.id} was made or changed by the job's user after the job had "
                    "started; if the job uses it, it will be missing from the image",
                    pid=process.pid,
                )
            )
    return found


def _inherited(process: ProcessObservation) -> list[Reason]:
    devices = [f"descriptor {fd.fd}" for fd in process.fds if fd.target.startswith("/dev/nvidia")]
    devices += [f"a mapping of {m.path}" for m in process.maps if m.path.startswith("/dev/nvidia")]
    if not devices:
        return []
    return [
        Reason(
            id="inherited-cuda",
            text=f"process {process.title} has inherited device files of the GPU ({devices[0]}), which CRIU dumps only "
            "with limosa's plugin",
            exit_code=24,
            hint="limosa doctor says why the plugin is missing",
            pid=process.pid,
        )
    ]
