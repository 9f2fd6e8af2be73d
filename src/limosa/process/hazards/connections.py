"""Sockets: connections to processes outside of the job, and kinds that CRIU does not know."""

from __future__ import annotations

from collections.abc import Iterator

from limosa.errors import Reason
from limosa.process.hazards.shared import names, place
from limosa.process.observation import JobObservation, ProcessObservation, SocketObservation

_INET = ("inet", "inet6")
_PROTOCOLS = ("tcp", "udp", "udplite", "raw", "icmp")
_FAMILIES = ("unix", "netlink", "packet", *_INET)
_RUN = "start the job with limosa run"


def _connected(socket: SocketObservation) -> bool:
    return socket.protocol == "tcp" and socket.state not in ("listen", "close")


def has_connections(obs: JobObservation) -> bool:
    """Return whether any process of the job has a TCP connection, wherever its other end is."""
    return any(_connected(socket) for process in obs.processes for socket in process.sockets)


def is_inside(obs: JobObservation, socket: SocketObservation) -> bool:
    """Return whether nobody outside of the job is at the other end of a TCP connection.

    The job holds it, or nobody does: the other end of a connection within this machine (both addresses are the same)
    that the kernel does not know any more has been closed.
    """
    if socket.peer_pids:
        return obs.pids.issuperset(socket.peer_pids)
    if socket.peer_inode:
        return obs.host.hidden_processes == 0
    return bool(socket.remote) and socket.remote.rpartition(":")[0] == socket.local.rpartition(":")[0]


Holders = list[tuple[ProcessObservation, SocketObservation]]


def connection_hazards(
    obs: JobObservation,
    *,
    tcp_established: bool,
    tcp_close: bool,
    skip_in_flight: bool = False,
    ext_unix_sk: bool = False,
) -> list[Reason]:
    """Return what stands against dumping a job's sockets.

    Args:
        obs: the job.
        tcp_established: connections to processes outside may be kept in the image.
        tcp_close: they may be brought back closed.
        skip_in_flight: connections that the job has not accepted may be left out.
        ext_unix_sk: datagram sockets may be connected anew to the name outside that they send to.

    Returns:
        ``socket-outside``, ``socket-shared``, ``socket-pair``, ``tcp-outside``, ``tcp-in-flight``, ``socket-kind`` (13)
        and the warnings ``peer-unknown``, ``tcp-close-inside``.
    """
    sockets: dict[int, Holders] = {}
    for process in obs.processes:
        for socket in process.sockets:
            sockets.setdefault(socket.inode, []).append((process, socket))
    found: list[Reason] = []
    inner = False
    for holders in sockets.values():
        process, socket = holders[0]
        where = place([(p, s.fd) for p, s in holders])
        found += _kind(process, socket, where)
        if socket.holders:
            found.append(_shared(process, socket, where))
        elif socket.family == "unix":
            found += _unix(obs, process, socket, where, ext_unix_sk)
        elif _connected(socket):
            if is_inside(obs, socket):
                inner = True
            elif not (tcp_established or tcp_close):
                found.append(_tcp_outside(process, socket, where))
        if socket.protocol == "tcp" and socket.state == "listen" and socket.queued and not skip_in_flight:
            found.append(_in_flight(process, socket, where))
    found += _pairs(sockets)
    if inner and tcp_close:
        text = "--tcp-close closes every connection of the job, also those between its own processes"
        found.append(Reason(id="tcp-close-inside", text=text, hint="--tcp-established keeps them", pid=obs.root))
    return found


def _kind(process: ProcessObservation, socket: SocketObservation, where: str) -> Iterator[Reason]:
    known = socket.family in _FAMILIES and (socket.family not in _INET or socket.protocol in _PROTOCOLS)
    if socket.family == "unknown":
        text = f"{where} is a socket of a kind that cannot be told from outside"
        yield Reason(id="socket-kind", text=text, pid=process.pid)
    elif not known:
        name = socket.protocol or socket.family
        text = f"{where} is a socket of kind {name}, which CRIU cannot dump"
        yield Reason(id="socket-kind", text=text, exit_code=13, pid=process.pid)


def _shared(process: ProcessObservation, socket: SocketObservation, where: str) -> Reason:
    what = f"listens on {socket.local}" if socket.state == "listen" else f"is a {socket.family} socket"
    return Reason(
        id="socket-shared",
        text=f"{where} {what} and is also held by process {names(socket.holders)}, which is not part of the job",
        exit_code=13,
        hint=f"{_RUN}, or checkpoint the process that both got it from",
        pid=process.pid,
        forceable=True,
    )


def _unix(
    obs: JobObservation, process: ProcessObservation, socket: SocketObservation, where: str, ext_unix_sk: bool
) -> Iterator[Reason]:
    outside = [peer for peer in socket.peers if peer.pid not in obs.pids]
    waiting = [peer for peer in socket.pending if peer.pid not in obs.pids]
    if not socket.peer_known and socket.state == "established":
        text = f"{where} is a unix socket; who is at its other end cannot be asked here (no sock_diag)"
        yield Reason(id="peer-unknown", text=text, pid=process.pid)
    elif socket.peer_inode and not socket.peers and not obs.host.hidden_processes:
        text = f"{where} is a unix socket whose other end no process holds (it may be on its way from one to another)"
        yield Reason(id="peer-unknown", text=text, pid=process.pid)
    elif outside or (socket.peer_inode and not socket.peers):
        by_name = socket.type == "dgram" and bool(socket.remote)
        if by_name and ext_unix_sk:
            return
        who = f"process {names(outside)}" if outside else "a process that may not be looked into"
        name = f" ({socket.remote})" if socket.remote else ""
        yield Reason(
            id="socket-outside",
            text=f"{where} is a unix socket connected to {who}{name}, which is not part of the job",
            exit_code=13,
            hint="--ext-unix-sk connects it anew to whoever has that name then" if by_name else f"close it, or {_RUN}",
            pid=process.pid,
        )
    elif waiting:
        yield Reason(
            id="socket-outside",
            text=f"{where} listens on {socket.local}, where process {names(waiting)} from outside of the job waits "
            "to be accepted",
            exit_code=13,
            hint="try again when it has been accepted",
            pid=process.pid,
        )


def _pairs(sockets: dict[int, Holders]) -> Iterator[Reason]:
    """Refuse pairs that CRIU 4.2.1 dumps and cannot restore ("BUG at criu/sk-unix.c:1713"; seen, and read there).

    It makes both ends in the process with the lowest pid of those that have the one it met first. Where that process
    has the other end as well, and one with a still lower pid, too, CRIU takes the latter for the maker of that end.
    """
    met = {inode: n for n, inode in enumerate(sockets)}
    for inode, holders in sockets.items():
        peer = holders[0][1].peer_inode
        if holders[0][1].family != "unix" or peer not in sockets or met[peer] < met[inode]:
            continue
        maker, others = min(process.pid for process, _ in holders), {process.pid for process, _ in sockets[peer]}
        if maker in others and (low := min(others)) < maker:
            where = place([(p, s.fd) for p, s in holders])
            yield Reason(
                id="socket-pair",
                text=f"{where} is one end of a pair of unix sockets; the other one process {maker} has as well, and "
                f"process {low}, whose pid is lower: CRIU could not restore that",
                exit_code=13,
                hint=f"have process {maker} close the end that it does not use, or start the job again",
                pid=maker,
            )


def _tcp_outside(process: ProcessObservation, socket: SocketObservation, where: str) -> Reason:
    far = f" (process {names(socket.peers)})" if socket.peers else ""
    return Reason(
        id="tcp-outside",
        text=f"{where} is a TCP connection from {socket.local} to {socket.remote or 'nowhere yet'}{far}, "
        "which is not part of the job",
        exit_code=13,
        hint="--tcp-close brings it back closed, --tcp-established keeps it for a peer that waits",
        pid=process.pid,
    )


def _in_flight(process: ProcessObservation, socket: SocketObservation, where: str) -> Reason:
    return Reason(
        id="tcp-in-flight",
        text=f"{where} listens on {socket.local} and has {socket.queued} connection"
        f"{'s' if socket.queued > 1 else ''} that it has not accepted, which CRIU cannot dump",
        exit_code=13,
        hint="try again when they have been accepted; --skip-in-flight leaves them out, their clients connect again",
        pid=process.pid,
    )
