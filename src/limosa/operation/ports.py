"""The ports that an image's job had: who has them now, and what its own closed connections have left on them.

CRIU binds them first; if one cannot be bound, the whole restore fails. A living process that has one is named. What
closed connections have left is removed, just as SO_REUSEADDR would ignore it. If the kernel does not allow that, Limosa
waits for it, a minute at most.
"""

from __future__ import annotations

import errno
import os
import time

from limosa.errors import Reason, Refused
from limosa.operation.jobs import command_of
from limosa.operation.work import Work
from limosa.process import ports
from limosa.process.criu.bound import Bound, bound_sockets
from limosa.process.ports import User
from limosa.progress import Progress

_SECONDS = 70.0
"""How long a connection is waited for that nobody has any more: TIME-WAIT lasts 60 s, of which the kernel is free to
take a little more."""


def in_the_way(images_fd: int) -> list[Reason]:
    """What stands against binding the ports of an image: refusals; what will pass by itself as a warning."""
    found = []
    for bound in bound_sockets(images_fd):
        code = ports.try_bind(bound)
        living, remains = _who(bound) if code == errno.EADDRINUSE else ([], [])
        if code == errno.EADDRINUSE and not (living or remains):
            code = ports.try_bind(bound)  # who had it may have gone since
        if code == errno.EADDRINUSE:
            if remains:  # whether a living one is in the way as well shows once these are gone
                text = f"{_had(bound)}: {_remains(remains)} there; a restore takes that away, or waits for it"
                found.append(Reason(id="port-remains", text=text))
            else:
                found.append(_taken(bound, living))
        elif code == errno.EADDRNOTAVAIL or (code == errno.ENODEV and bound.device):
            text = f"{_had(bound)}: this machine does not have that address"
            hint = "give it the address (ip address add), or restore the job where it is"
            found.append(Reason(id="address-missing", text=text, exit_code=23, hint=hint))
    return found


def free(work: Work, images_fd: int) -> None:
    """Waits until nothing but living processes could be in the way of binding an image's ports, or takes it away.

    Raises Refused (a process has one, or a closed connection stays for longer than they do) and what the clock does.
    """
    begun, destroyed = time.monotonic(), False
    with work.spent("ports"):
        for bound in bound_sockets(images_fd):
            while ports.try_bind(bound) == errno.EADDRINUSE:
                living, remains = _who(bound)
                passing = [user for user in remains if user.is_remains]
                if passing and not destroyed:
                    destroyed = ports.destroy(passing)
                    if destroyed:
                        continue
                if living or not remains or time.monotonic() - begun > _SECONDS:
                    if ports.try_bind(bound) != errno.EADDRINUSE:  # who had it has gone since
                        break
                    raise Refused([_taken(bound, living, remains)])
                work.check()
                left = max((user.seconds or 0.0 for user in remains), default=0.0)
                message = f"{_had(bound)}: {_remains(remains)} there, for {left:.0f} s more"
                work.progress(Progress("ports", message=message))
                time.sleep(0.2)
            destroyed = False


def _who(bound: Bound) -> tuple[list[User], list[User]]:
    """Sockets that somebody has, and those that nobody has any more."""
    found = ports.users(bound)
    return [user for user in found if user.inode], [user for user in found if not user.inode]


def _had(bound: Bound) -> str:
    return f"the job {'listened on' if bound.listening else 'had'} {bound}"


def _remains(users: list[User]) -> str:
    count = len(users)
    return "a closed connection is still" if count == 1 else f"{count} closed connections are still"


def _taken(bound: Bound, living: list[User], remains: list[User] = []) -> Reason:  # noqa: B006 - never changed
    if remains and not living:
        states = ", ".join(sorted({user.state for user in remains}))
        text = f"{_had(bound)}: {_remains(remains)} there ({states}), and its other side does not answer"
        return Reason(id="port-taken", text=text, exit_code=23, hint="ss -tan shows it; ss -K ends it")
    for inode, (pid, name) in ports.owners(user.inode for user in living).items():
        user = next(user for user in living if user.inode == inode)
        command = " ".join(command_of(pid))[:80] or name
        what = "listens there" if user.state == "listen" else f"has {user.remote or 'it'} on it ({user.state})"
        text = f"{_had(bound)}: process {pid} ({command}) {what}"
        return Reason(id="port-taken", text=text, exit_code=23, hint=f"end process {pid}, or wait for it", pid=pid)
    who = "a process that may not be looked into has it" if living or os.geteuid() else "somebody has bound it"
    return Reason(id="port-taken", text=f"{_had(bound)}: {who}", exit_code=23, hint=f"ss -anp 'sport = {bound.port}'")
