"""The gates of processes under the shim: closed before their memory is taken, opened when it is back.

Once the first one has opened there is no way back, only forward. A gate that somebody left closed has its job stand
still although nobody works on it.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Sequence
from functools import partial

from limosa.errors import FailedUndone, LimosaError, NoSuchProcess, NotFinished, Reason
from limosa.gpu import State
from limosa.operation import claims
from limosa.operation.journal import Member, Noted, Phase
from limosa.operation.parked.calls import each, each_at_once, together
from limosa.operation.results import Recovered
from limosa.operation.work import Clock, Work
from limosa.parking.protocol import Stand
from limosa.parking.shim import Shim, under_shim
from limosa.process.candidates import candidates
from limosa.process.identity import Identity
from limosa.process.namespaces import is_ours
from limosa.process.slurp import MOST_ENVIRONMENT, slurp

STACK_BYTES = 16
"""What a context's stack limit is lowered to while it is saved; the driver rounds it up to the least it knows."""
GATE_SECONDS = 5.0
"""How long a process may take to come out of the driver and finish its work on the GPU."""
_ANSWER, _PATIENCE = 4.0, 1.0
"""Seconds for one that is looked at because its gate may have been left closed."""


def close(shims: Sequence[Shim], clock: Clock) -> None:
    """Closes gates at once; within the operation's own limit, where that is less.

    Raises GateStaysOpen: one could not be closed in time; others may be closed now.
    """
    together([partial(shim.close_gate, clock.at_most(GATE_SECONDS)) for shim in shims])


def lower_stacks(shims: Sequence[Shim]) -> None:
    """Lower the stack limits of processes whose gate is closed, where nobody has set them: less for the driver to save.

    They are put back by :meth:`Shim.stack`, or by the gate when it opens. That it cannot be done costs time, no more.
    """

    def one(shim: Shim) -> None:
        with contextlib.suppress(LimosaError):
            shim.stack(STACK_BYTES)

    together([partial(one, shim) for shim in shims])


class Gates:
    """The gates of one operation: from the first one that is to open there is no way back."""

    def __init__(self, work: Work):
        self._work, self.opened = work, False

    def open(self, parts: Sequence[tuple[Member, Shim]]) -> None:
        """Notes it and opens them. Raises NotFinished: one does not open."""
        self.opened = True
        for member, _ in parts:
            self._work.try_note(Noted.OPEN, Phase.BEGIN, member.pid)

        def one(shim: Shim) -> None:
            if shim.hello().stand is not Stand.OPEN:
                shim.open_gate()

        try:
            each_at_once([(member, partial(one, shim)) for member, shim in parts])
        except LimosaError as error:
            raise gate_was_opened(self._work.operation, str(error)) from error

    def open_all(self, members: Sequence[Member]) -> None:
        """The same, of members that there is no connection to; one that has ended needs none."""
        with contextlib.ExitStack() as stack:
            there = []
            for member in members:
                with contextlib.suppress(NoSuchProcess):
                    there.append((member, stack.enter_context(Shim(member.identity))))
            self.open(there)

    def leave(self, parts: Sequence[tuple[Member, Shim]]) -> None:
        """Takes what was mapped out again. Raises NotFinished: one was opened, and the job may run."""
        if self.opened:
            raise gate_was_opened(self._work.operation)
        leave(parts)


def gate_was_opened(what: str, detail: str = "a gate does not open") -> NotFinished:
    """What is said where there is no way back any more, and forward does not go on."""
    return NotFinished(
        what=what, detail=detail, undo_detail="the job is where it was to go: limosa recover opens it",
        job_state="unknown",
    )  # fmt: skip


def leave(parts: Sequence[tuple[Member, Shim]]) -> None:
    """Takes what was mapped out again, of those whose gate is still closed."""

    def one(shim: Shim) -> None:
        if shim.hello().stand is not Stand.OPEN:
            shim.unmap()

    each([(member, partial(one, shim)) for member, shim in parts])


def open_whole(member: Member, shim: Shim, stand: Stand) -> None:
    """Opens the gate of a process that has all of its memory, unless it is open. Raises FailedUndone: it has not."""
    if stand is Stand.CLOSED:
        shim.open_gate()
    elif stand is not Stand.OPEN:
        raise FailedUndone(f"not all of the memory of process {member.pid} came back to it")


def stand_of(member: Member) -> Stand:
    """How the gate of a process stands; open where it has ended."""
    try:
        with Shim(member.identity) as shim:
            return shim.hello().stand
    except NoSuchProcess:
        return Stand.OPEN


def any_waits(members: Sequence[Member]) -> bool:
    """Whether the memory of any of these is away, or its gate closed: then a restore alone does not make them run."""
    return any(under_shim(m.pid) and stand_of(m) is not Stand.OPEN for m in members if m.identity.alive())


def any_shut(members: Sequence[Member]) -> bool:
    """Whether one that the driver has checkpointed would stand at its gate if the driver alone restored it.

    One whose shim does not answer may be: a resume says so before anything is touched.
    """
    for member in members:
        if member.was == State.CHECKPOINTED and under_shim(member.pid):
            try:
                with Shim.to_look(member.identity) as shim:
                    if shim.hello().stand is not Stand.OPEN:
                        return True
            except LimosaError:
                return True
    return False


def refuse_shut(members: Sequence[Member]) -> None:
    """The last look before an operation says that jobs run: of these nobody has opened the gate, so it has to be open.

    Raises FailedUndone: one would stand still although it was said to run.
    """
    for member in members:
        stand = Stand.OPEN
        with contextlib.suppress(LimosaError), Shim(member.identity) as shim:
            stand = shim.hello().stand
        if stand is not Stand.OPEN:
            raise FailedUndone(f"the gate of process {member.pid} is {stand.name.lower()}: it would not go on")


def closed_reason(pid: int) -> Reason:
    """The refusal for a process whose gate is closed before anything was done to it."""
    text = f"the gate of process {pid} is closed: somebody held it still and has not let it go on"
    return Reason(id="gate-closed", text=text, exit_code=19, hint="limosa recover opens it", pid=pid)


def open_left(state_of: Callable[[int], State | None], *, dry_run: bool = False) -> list[Recovered]:
    """Opens the gates of processes that have all their memory and that nobody works on, or died working on.

    An operation claims a process before it closes its gate. One that died has left its claim and journal, which say
    more than the gate does. One that the driver has checkpointed is suspended, and waits at its gate for a resume:
    ``state_of`` asks the driver, by its pid (None: it has no CUDA state).
    """
    found = []
    for pid in candidates():
        if not under_shim(pid) or not _is_in_reach(pid) or _is_claimed(pid):
            continue
        with contextlib.suppress(LimosaError, OSError), Shim.to_look(Identity.of(pid), _ANSWER, _PATIENCE) as shim:
            if shim.hello().stand is not Stand.CLOSED or _is_claimed(pid):
                continue
            entry = Recovered(kind="gate", pid=pid, state="running")
            try:
                state = state_of(pid)
            except NoSuchProcess:
                continue
            except LimosaError as error:
                text = f"process {pid} waits at its gate, and the driver does not say whether it is suspended: {error}"
                entry.state, entry.error, entry.exit_code = "unknown", text, 40
                found.append(entry)
                continue
            # What has none here may have it of another driver, in a node of software GPUs.
            if state not in (State.RUNNING, State.LOCKED) and not (state is None and is_ours(pid, "mnt")):
                continue
            found.append(entry)
            if dry_run:
                entry.did = f"would open the gate of process {pid}, which somebody left closed"
                continue
            try:
                shim.open_gate()
                entry.did = f"opened the gate of process {pid}, which somebody left closed"
            except LimosaError as error:
                entry.state, entry.error, entry.exit_code = "unknown", str(error), 40
    return found


def _is_in_reach(pid: int) -> bool:
    """Whether its socket has a name here, and claims on it would be seen.

    In another network namespace nobody need wait for it. One that was started with another runtime folder is somebody
    else's who keeps his claims there.
    """
    try:
        if os.stat(f"/proc/{pid}/ns/net").st_ino != os.stat("/proc/self/ns/net").st_ino:
            return False
        environment = slurp(f"/proc/{pid}/environ", most=MOST_ENVIRONMENT)
    except OSError:
        return False
    folder = re.search(rb"(?:^|\0)LIMOSA_RUNTIME_DIR=([^\0]*)", environment)
    return folder is None or folder[1] == os.environb.get(b"LIMOSA_RUNTIME_DIR", b"")


def _is_claimed(pid: int) -> bool:
    return any(pid == one.pid for claim in claims.everybodys(whole=True) for one in claim.pids)
