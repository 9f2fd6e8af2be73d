"""What a CRIU that failed or was killed leaves: log, nftables table, connected sockets in repair mode, half a tree.

A CRIU that fails by itself takes both away. One that is killed cannot: the job's connections would stand still, each
call on them answered with EPERM, until somebody does it in its place. Its log names the run from its first line on, so
nothing has to be written down for this beforehand.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from limosa.errors import FailedUndone, LimosaError
from limosa.process.criu import network
from limosa.process.criu.find import find as find_criu
from limosa.process.criu.program import Criu
from limosa.process.criu.run import DUMP_LOG
from limosa.process.criu.stats import read_at
from limosa.process.identity import Handle, Identity, is_pending, read_stat
from limosa.process.places import own_folder

_RUN_ID = re.compile(rb"CRIU run id = ([0-9A-Za-z-]{8,40})")
_SHORTEST = 8  # characters of a run id that tell one run from all others
_FAMILY = "inet "  # CRIU's tables are of this family; manifests name them without it
_KEPT_LOGS = 20  # a verbose one has a few MiB, and /run is memory


def release_network(tree: Iterable[Identity], log_fd: int, root_pid: int, criu: Criu | None = None) -> None:
    """Gives a living job its network back after a dump that did not end by itself; harmless after any other.

    ``log_fd``: the folder with CRIU's log of that dump, or -1. ``criu``: whose ``nft`` to use; None: one that works.
    """
    for table in tables_of(log_fd, root_pid, criu):
        remove_table(table, criu)
    _leave_repair(tree)


def _leave_repair(tree: Iterable[Identity]) -> None:
    for identity in tree:
        if identity.alive():
            with contextlib.suppress(LimosaError, OSError):
                network.leave_repair(identity.pid)


def connections_go_on(tree: Sequence[Identity], criu: Criu | None = None, *, shut: bool = False) -> None:
    """Gives a container that lives, and has a network of its own, its connections back; harmless where it has them.

    It must still be held: what runs sees EPERM on a socket in repair mode. FailedUndone: they were shut, and stay so.
    """
    _leave_repair(tree)
    failed: LimosaError | OSError | None = None
    for _ in range(2):  # nft may have been killed
        living = next((identity for identity in tree if identity.alive()), None)
        if living is None:
            return
        try:
            network.open_again(criu or find_criu(), living.pid)
        except (LimosaError, OSError) as error:
            failed = error
        else:
            return
    if shut:
        raise FailedUndone(f"the container's connections are shut, and could not be opened again: {failed}")


def keep_log(folder_fd: int, name: str, operation_id: str) -> Path:
    """Copies a log of a failed dump into the caller's ``logs`` under the operation's id; keeps the newest twenty.

    The undo removes its folder. Returns where it is kept; where it could not be copied, where it was.
    """
    folder = own_folder("logs")
    target = folder / f"{operation_id}.log"
    try:
        source = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder_fd)
        with open(source, "rb") as log, open(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
            shutil.copyfileobj(log, out, 1 << 20)
    except OSError:
        return Path(os.readlink(f"/proc/self/fd/{folder_fd}")) / name
    logs = sorted(folder.glob("*.log"), key=lambda path: path.stat().st_mtime)
    for old in logs[:-_KEPT_LOGS]:
        with contextlib.suppress(OSError):
            old.unlink()
    return target


def has_ended(root: Identity) -> bool:
    """Whether CRIU has ended a job that it has written; a large tree takes a while to be gone."""
    with contextlib.suppress(LimosaError), Handle(root) as handle:
        handle.wait(2.0)
    return not root.alive()


def end_rest(tree: Iterable[Identity]) -> None:
    """Ends what lives on of a job whose root CRIU has ended after its image was committed: the image is the copy."""
    for identity in tree:
        with contextlib.suppress(LimosaError), Handle(identity) as handle:
            handle.signal(signal.SIGKILL)


def let_go_on(tree: Iterable[Identity]) -> list[int]:
    """Continues what is stopped (state T), or about to be, of a job that CRIU has brought back; returns the pids.

    It was stopped between the last look at it and the moment when CRIU froze it, and CRIU brings it back as it found
    it; the driver cannot be asked about a stopped process, it answers after SIGCONT (measured).
    """
    found = []
    for identity in stopped(tree):
        with contextlib.suppress(LimosaError), Handle(identity) as handle:
            handle.signal(signal.SIGCONT)
            found.append(identity.pid)
    return found


def stopped(tree: Iterable[Identity]) -> Iterator[Identity]:
    """Those of a job that are stopped, or about to be: CRIU sends SIGSTOP last of all, and it may be on its way."""
    for identity in tree:
        with contextlib.suppress(LimosaError, OSError):
            if read_stat(identity.pid).stopped or is_pending(f"/proc/{identity.pid}", signal.SIGSTOP):
                yield identity


def remove_table(table: str, criu: Criu | None = None) -> None:
    """Removes a table that CRIU left in nftables (with or without "inet"); one that is not there is no error."""
    with contextlib.suppress(LimosaError, OSError):
        name = table if table.startswith(_FAMILY) else _FAMILY + table
        network.remove_table(criu or find_criu(), name)


def tables_of(log_fd: int, root_pid: int = 0, criu: Criu | None = None) -> list[str]:
    """The tables there are of the run that wrote this log: its id is cut short in their name; before 4.2 the pid.

    The folder with the log is -1, and the job's topmost pid 0, where they are not known.
    """
    said = _RUN_ID.search(read_at(log_fd, DUMP_LOG, 1 << 12)) if log_fd >= 0 else None
    run_id = said[1].decode() if said else ""
    found = []
    with contextlib.suppress(LimosaError, OSError):
        for table in network.tables(criu or find_criu()):
            name = table.removeprefix(f"{_FAMILY}CRIU-")
            if name == str(root_pid) or (len(name) >= _SHORTEST and run_id.startswith(name)):
                found.append(table)
    return found
