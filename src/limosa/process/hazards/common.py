"""What speaks against any operation: the job's owner, and whether it runs at all."""

from __future__ import annotations

from limosa.errors import Reason
from limosa.process.observation import JobObservation

_CAP_SYS_PTRACE = 1 << 19


def may_trace_anyone(obs: JobObservation) -> bool:
    """Return whether Limosa may look into every process (capabilities(7): CAP_SYS_PTRACE)."""
    return bool(obs.host.caps & _CAP_SYS_PTRACE)


def more_rights(obs: JobObservation) -> str:
    """Return how the caller gets the right to look into every process: sudo is of no use to root."""
    if obs.host.uid != 0:
        return "run limosa with sudo"
    if not may_trace_anyone(obs):
        return "give limosa CAP_SYS_PTRACE, which root lacks here (docker run --cap-add SYS_PTRACE)"
    return "run limosa on the host, outside of this container"


def common_hazards(obs: JobObservation) -> list[Reason]:
    """Return what stands against any operation on a job.

    Args:
        obs: the job.

    Returns:
        ``own-ancestor`` (2), ``wrong-user`` and ``permission`` (11), ``stopped``, ``frozen`` (13) and the warning
        ``comes-back-stopped``.
    """
    found = [*_own(obs), *_access(obs)]
    # The driver hangs on a stopped process past every time limit; CRIU alone dumps it as it is.
    cpu_only = not any(process.has_libcuda or process.unreadable for process in obs.processes)
    for process in obs.processes:
        if process.state == "T" and cpu_only:
            text = f"process {process.title} is stopped (state T), and so it comes back"
            found.append(Reason(id="comes-back-stopped", text=text, hint=f"kill -CONT {process.pid}", pid=process.pid))
        elif process.state in "Tt" and not cpu_only:  # whoever traces one without CUDA is refused as a debugger
            traced = process.state == "t" and process.tracer_pid
            how = (
                f"held by the debugger {process.tracer_pid} ({process.tracer_name})" if traced else "stopped (state T)"
            )
            found.append(
                Reason(
                    id="stopped",
                    text=f"process {process.title} is {how}: the driver would hang until it goes on",
                    exit_code=13,
                    hint="let the debugger go" if traced else f"kill -CONT {process.pid}",
                    pid=process.pid,
                )
            )
        elif process.frozen:
            found.append(
                Reason(
                    id="frozen",
                    text=f"process {process.title} is frozen by its cgroup {process.frozen}",
                    exit_code=13,
                    hint="thaw the cgroup (docker unpause, systemctl thaw)",
                    pid=process.pid,
                )
            )
    return found


def _own(obs: JobObservation) -> list[Reason]:
    own = obs.host.ancestors
    if own and (obs.root in own or own[0] in obs.pids):
        return [
            Reason(
                id="own-ancestor",
                text=f"limosa was itself started from process {obs.root}: stopping it would stop limosa",
                exit_code=2,
                hint="run limosa from another terminal, outside of that job",
                pid=obs.root,
            )
        ]
    return []


def _access(obs: JobObservation) -> list[Reason]:
    found: list[Reason] = []
    for process in obs.processes:
        if process.uid != obs.host.uid and not may_trace_anyone(obs):
            found.append(
                Reason(
                    id="wrong-user",
                    text=f"process {process.title} belongs to user {process.uid}, and limosa runs as {obs.host.uid}",
                    exit_code=11,
                    hint=f"run limosa as that user, or {more_rights(obs)}",
                    pid=process.pid,
                )
            )
        elif process.unreadable:
            what = ", ".join(process.unreadable)
            found.append(
                Reason(
                    id="permission",
                    text=f"process {process.title} may not be looked into ({what} of /proc/{process.pid})",
                    exit_code=11,
                    hint=more_rights(obs),
                    pid=process.pid,
                )
            )
    return found
