"""Pipes, ptys and nameless shared memory that the job holds together with processes outside of it.

CRIU does not notice most of these: it dumps the job's end, and the restored job talks to nobody. So they are refused
here, by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from limosa.errors import Reason
from limosa.process.hazards.common import more_rights
from limosa.process.observation import FdObservation, JobObservation, Peer, ProcessObservation

_RUN = "start the job with limosa run"


def names(peers: Iterable[Peer]) -> str:
    """Return "4711 (bash) and 2 more", each process once."""
    seen = {peer.pid: f"{peer.pid} ({peer.name})" if peer.name else str(peer.pid) for peer in peers}
    listed = list(seen.values())
    return ", ".join(listed[:2]) + (f" and {len(listed) - 2} more" if len(listed) > 2 else "")


def place(holders: list[tuple[ProcessObservation, int]]) -> str:
    """Return "descriptor 1, 2 of process 10 (python) and 3 more processes"."""
    process = holders[0][0]
    fds = ", ".join(str(fd) for holder, fd in holders if holder.pid == process.pid)
    others = len({holder.pid for holder, _ in holders} - {process.pid})
    more = f" and {others} more process{'es' if others > 1 else ''}" if others else ""
    return f"descriptor {fds} of process {process.title}{more}"


def shared_hazards(obs: JobObservation) -> list[Reason]:
    """Return what the job shares with processes outside of it.

    Returns:
        ``pipe-outside``, ``pty-outside``, ``memory-shared`` (13, forceable) and the warnings ``shm-outside``,
        ``peers-hidden``.
    """
    return [*_pipes(obs), *_ptys(obs), *_memory(obs), *_named(obs), *_hidden(obs)]


def _pipes(obs: JobObservation) -> Iterator[Reason]:
    pipes: dict[str, list[tuple[ProcessObservation, FdObservation]]] = {}
    for process in obs.processes:
        for fd in process.fds:
            if fd.kind == "pipe" and fd.peers:
                pipes.setdefault(fd.target, []).append((process, fd))
    for holders in pipes.values():
        process, first = holders[0]
        readers = [peer for peer in first.peers if "r" in peer.access]
        writers = [peer for peer in first.peers if "w" in peer.access]
        ends = [f"read by process {names(readers)}"] if readers else []
        ends += [f"written by process {names(writers)}"] if writers else []
        outside = " and ".join(ends) or f"held by process {names(first.peers)}"
        yield Reason(
            id="pipe-outside",
            text=f"{place([(p, fd.fd) for p, fd in holders])} is a pipe {outside}, which is not part of the job",
            exit_code=13,
            hint=f"{_RUN}, with output to a file",
            pid=process.pid,
            forceable=True,
        )


def _ptys(obs: JobObservation) -> Iterator[Reason]:
    for process in obs.processes:
        for fd in process.fds:
            if fd.kind == "pty" and fd.tty_index >= 0 and fd.peers:
                yield Reason(
                    id="pty-outside",
                    text=f"descriptor {fd.fd} of process {process.title} is the terminal /dev/pts/{fd.tty_index} that "
                    f"process {names(fd.peers)} works on, which is not part of the job",
                    exit_code=13,
                    hint="end that process, or checkpoint it alone",
                    pid=process.pid,
                    forceable=True,
                )


ARENA = "/memfd:limosa-arena"
"""Device memory of a suspended job, which the vault holds as well and lets go of when nobody comes back for it."""


def _memory(obs: JobObservation) -> Iterator[Reason]:
    seen: set[tuple[str, int]] = set()
    for process in obs.processes:
        things = [(m.path, m.inode, m.peers, "maps") for m in process.maps if m.peers and not m.named_shm]
        things += [
            (fd.target, fd.inode, fd.peers, f"holds (descriptor {fd.fd})")
            for fd in process.fds
            if fd.kind == "memfd" and fd.peers and not fd.target.startswith(ARENA)
        ]
        for path, inode, peers, verb in things:
            if (path, inode) in seen:
                continue
            seen.add((path, inode))
            what = "anonymous shared memory" if path.startswith("/dev/zero") else f"the shared memory {path}"
            yield Reason(
                id="memory-shared",
                text=f"process {process.title} {verb} {what} together with process {names(peers)}, which is not part "
                "of the job: after a restore each would have its own",
                exit_code=13,
                hint="checkpoint the process that both descend from",
                pid=process.pid,
                forceable=True,
            )


def _named(obs: JobObservation) -> Iterator[Reason]:
    """A restored job has the same named memory, with whatever is in it then."""
    seen = set()
    for process in obs.processes:
        for m in process.maps:
            if m.peers and m.named_shm and m.path not in seen:
                seen.add(m.path)
                yield Reason(
                    id="shm-outside",
                    text=f"process {process.title} shares {m.path} with process {names(m.peers)}, which is not part of "
                    "the job: its contents are not in the image; a restored job finds what is there then",
                    pid=process.pid,
                )


def _hidden(obs: JobObservation) -> Iterator[Reason]:
    """Warn where pipes or sockets could have ends in processes that may not be looked into."""
    used = any(fd.kind in ("pipe", "socket", "memfd") for process in obs.processes for fd in process.fds)
    if used and obs.host.hidden_processes:
        why, hint = "may not be looked into", f"to be sure, {more_rights(obs)}"
        if obs.host.crowded_processes == obs.host.hidden_processes:
            why, hint = "have too many descriptors or mappings to be looked at", ""
        yield Reason(
            id="peers-hidden",
            text=f"{obs.host.hidden_processes} processes of other users {why}: whether they hold the "
            "other end of the job's pipes or sockets is not known",
            hint=hint,
            pid=obs.root,
        )
