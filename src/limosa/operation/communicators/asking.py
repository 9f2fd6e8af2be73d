"""What the shims of a job say of communicators, before anything is done: who has which rank, what stands against it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import msgspec

from limosa import gpu
from limosa.errors import LimosaError, Reason
from limosa.operation.communicators import peers
from limosa.operation.communicators.closing import between, within
from limosa.operation.communicators.meeting import Id, Said, whole
from limosa.operation.journal import Member
from limosa.parking.answers import Comm
from limosa.parking.shim import Shim

MOST_TOLD = 256
"""Ranks of one process."""


class Rank(msgspec.Struct, frozen=True):
    """One rank of a communicator, and where it is."""

    communicator: str  # 32 hex digits, the same in all of its ranks
    rank: int  # -1 while the communicator is being made
    ranks: int
    gpu: str = ""  # UUID; "" where the process is not on its GPUs


class Communicators(msgspec.Struct):
    """What the shims of a job say."""

    n: int = 0  # how many there are between its processes
    reasons: list[Reason] = []  # what stands against closing them
    told: set[int] = set()  # the processes whose shim has told its communicators, be there any
    pids: set[int] = set()  # the processes that have some: what they share with each other goes with them
    within: bool = False  # whether one of them has several ranks of a communicator
    closed: bool = False  # whether Limosa has closed some, and not made them again
    ranks: dict[int, list[Rank]] = {}  # by pid, also of those that are within one process; the largest first


def ask(members: Sequence[Member]) -> Communicators:
    """Asks the shims of a job, each one question; where a process is that has communicators, one more."""
    users: dict[int, list[tuple[Member, Said]]] = {}  # whose processes say what: none is a word about another user's
    found = Communicators()
    for member in members:
        with contextlib.suppress(LimosaError), Shim.to_look(member.identity) as shim:
            said = Said(*shim.comms())
            users.setdefault(shim.owner, []).append((member, said))
            found.told.add(member.pid)
            if said.comms:
                found.ranks[member.pid] = _ranks(said.comms, [])
                if member.was == gpu.State.RUNNING:
                    found.ranks[member.pid] = _ranks(said.comms, shim.devices())
    elsewhere: dict[int, Comm] = {}  # by pid, the largest that has ranks elsewhere
    for saids in users.values():
        _add(found, elsewhere, saids)
    if elsewhere:
        theirs = peers.of({comm.id for comm in elsewhere.values()}, [m.pid for m in members])
        found.reasons += [_elsewhere(pid, comm, theirs.get(comm.id, [])) for pid, comm in elsewhere.items()]
    return found


def _add(found: Communicators, elsewhere: dict[int, Comm], saids: Sequence[tuple[Member, Said]]) -> None:
    """Adds what the processes of one user say."""
    shared, has = between([said for _, said in saids]), whole([said for _, said in saids])
    found.n += len(shared)
    found.within = found.within or within([said for _, said in saids])
    for member, said in saids:
        against: dict[str, list[Reason]] = {}
        for comm in said.comms:
            if comm.id not in shared:
                continue
            found.pids.add(member.pid)
            found.closed = found.closed or comm.closed
            if has[comm.id] or comm.joining:
                for reason in _against(member, comm):
                    against.setdefault(reason.id, []).append(reason)
            elif member.pid not in elsewhere or comm.ranks > elsewhere[member.pid].ranks:
                elsewhere[member.pid] = comm
        for reasons in against.values():
            text = reasons[0].text
            if len(reasons) > 1:
                text += f", and of {len(reasons) - 1} more of its communicators the same is true"
            found.reasons.append(msgspec.structs.replace(reasons[0], text=text))


def _ranks(comms: Sequence[Comm], gpus: Sequence[str]) -> list[Rank]:
    found = [
        Rank(hex_of(comm.id), comm.rank, comm.ranks, gpus[comm.device] if 0 <= comm.device < len(gpus) else "")
        for comm in comms
    ]
    return sorted(found, key=lambda one: (-one.ranks, one.communicator, one.rank))[:MOST_TOLD]


def hex_of(id_: Id) -> str:
    """A communicator's id as text."""
    return "".join(f"{part:016x}" for part in id_)


def _who(pid: int, comm: Comm) -> str:
    return f"process {pid} (rank {comm.rank} of {comm.ranks})"


def _elsewhere(pid: int, comm: Comm, theirs: Sequence[int]) -> Reason:
    """A communicator that has ranks in other processes than the job's."""
    text = f"{_who(pid, comm)} talks over NCCL to ranks that are not of this job"
    if theirs:
        text += f": {peers.named(theirs)}"
    return Reason(id="nccl-ranks", text=text, exit_code=13, hint=peers.way_out(pid, theirs), pid=pid)


def _against(member: Member, comm: Comm) -> list[Reason]:
    who = _who(member.pid, comm)
    if comm.strange:
        text = f"{who} has called {comm.strange}: Limosa cannot repeat that on a new communicator"
        hint = "end that communicator (ncclCommDestroy): one that is made anew can be made again"
        return [Reason(id="nccl-function", text=text, exit_code=13, hint=hint, pid=member.pid)]
    if comm.newer:
        text = f"{who} calls {comm.newer}, or is linked with it: a function of NCCL that Limosa does not know"
        hint = "a newer Limosa may know it; --force=nccl-newer if it is never called"
        return [Reason(id="nccl-newer", text=text, exit_code=13, hint=hint, pid=member.pid, forceable=True)]
    if comm.captured:
        text = f"{who} has a CUDA graph with operations of NCCL in it: the graph holds the old connections"
        hint = "leave collectives out of the graphs; in PyTorch: no torch.cuda.graph around them"
        return [Reason(id="nccl-graph", text=text, exit_code=13, hint=hint, pid=member.pid)]
    if comm.memory:
        text = f"{who} has memory of ncclMemAlloc, which its peers can see"
        hint = "free it (ncclMemFree), or take memory of cudaMalloc; in PyTorch: no torch.cuda.MemPool of NCCL's"
        return [Reason(id="nccl-memory", text=text, exit_code=13, hint=hint, pid=member.pid)]
    return []
