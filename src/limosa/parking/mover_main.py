"""The mover: the process that makes, maps and copies device memory for operations on parked jobs of one user.

Started by :mod:`limosa.parking.resident` and found by its socket; several controllers at once, a thread each
(``mover_session.py``). The vault also holds what it holds for an operation, so it may be killed at any moment, and is
replaced if it hangs. It ends ten minutes after it was last used (by a controller, or for a suspended job's memory that
it has pinned), after SIGTERM, or when told (``end``), as soon as nobody needs it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from limosa.gpu import binding
from limosa.ipc.messages import VERSION
from limosa.ipc.sessions import Sessions, listen
from limosa.parking import mover_arena, mover_chunks, mover_holding, mover_loading, mover_memory, mover_saving
from limosa.parking.mover_protocol import End
from limosa.parking.mover_session import Reply, Session, Shared, Verb
from limosa.parking.resident import holder_path, look_for, socket_path
from limosa.parking.resident_main import begin, listens
from limosa.parking.vault_protocol import Ping, Request

GROUPS = (mover_memory, mover_arena, mover_holding, mover_chunks, mover_saving, mover_loading)
NAME = "limosa-mover"
IDLE_SECONDS = float(os.environ.get("LIMOSA_MOVER_IDLE", "600"))
LOOK_SECONDS = 0.5
ARENA_SECONDS = 2.0


def ping(session: Session, asked: Ping, fds: Sequence[int]) -> Reply:
    """Say who it is, how busy, on which GPUs, and when it ends."""
    shared = session.shared
    n = len(shared.all()) - 1
    used = shared.resident or any(one.needed for one in shared.all())  # others may be looking at the same time
    left = max(0.0, ends_at(shared) - time.monotonic()) if not used else None
    said = {"pid": os.getpid(), "version": VERSION, "sessions": n, "gpus": shared.contexts.gpus(), "ends_in": left}
    return {**said, "retiring": shared.retiring}


def ends_at(shared: Shared) -> float:
    """Return when it ends (monotonic seconds) unless somebody uses it before; an arena may be kept for longer."""
    return max(shared.last + IDLE_SECONDS, shared.stay_until)


def end(session: Session, asked: End, fds: Sequence[int]) -> Reply:
    """End as soon as nobody else needs it."""
    session.shared.retiring = True
    return {}


def all_verbs() -> dict[type[Request], Verb]:
    """Return what does each request."""
    verbs: dict[type[Request], Verb] = {Ping: ping, End: end}
    for group in GROUPS:
        verbs.update(group.VERBS)
    return verbs


class MoverServer:
    """The mover's socket and its sessions."""

    def __init__(self, path: str, verbs: dict[type[Request], Verb]):
        self.path, self.shared = path, Shared()
        self.clients = Sessions(lambda: Session(self.shared, verbs))
        self.shared.sessions = self.clients
        # Bound elsewhere and renamed: whoever connects finds this mover or the one before, never none.
        part = f"{path}.{os.getpid()}"
        self.listening = listen(part)
        self._inode = os.stat(part).st_ino
        os.rename(part, path)

    def serve(self) -> None:
        """Answer until nobody has asked for a while, or it is to end; then until the last controller has gone."""
        shared, looked, looking = self.shared, time.monotonic(), threading.Thread()
        with selectors.DefaultSelector() as ready:
            ready.register(self.listening, selectors.EVENT_READ)
            while not shared.retiring:
                ready.select(LOOK_SECONDS)
                self.clients.accept(self.listening)
                mover_holding.look(shared)
                if time.monotonic() - looked > ARENA_SECONDS and not looking.is_alive():
                    looking = threading.Thread(target=mover_arena.look_after, args=(shared,), daemon=True)
                    looking.start()  # the vault may hang
                    looked = time.monotonic()
                if self.is_over() or not self.has_name() or self.any_stuck():
                    shared.retiring = True  # never written back: others set it meanwhile
        if self.has_name():
            with contextlib.suppress(OSError):
                os.unlink(self.path)
        self.clients.accept(self.listening)  # who has connected already is served
        self.listening.close()
        self.hold_on()

    def hold_on(self) -> None:
        """Wait until the last session has ended, or hangs; and, as long as something is held here, for who wants it."""
        shared = self.shared
        path, listening = holder_path(self.path), None
        while (self.clients and not shared.stuck()) or shared.resident:
            if shared.resident and listening is None:
                with contextlib.suppress(OSError):
                    listening = listen(path)
            if listening is not None:
                self.clients.accept(listening)
            mover_holding.look(shared)
            time.sleep(LOOK_SECONDS / 10)
        if listening is not None:
            listening.close()
            with contextlib.suppress(OSError):
                os.unlink(path)

    def is_over(self) -> bool:
        """Return whether nobody has used it for long enough."""
        shared = self.shared
        with shared.lock:
            needed = self.clients or shared.resident
            return not needed and time.monotonic() > ends_at(shared)

    def any_stuck(self) -> bool:
        """Return whether a call has been under way for longer than it may: others had better use another mover."""
        return any(session.until < time.monotonic() for session in self.shared.all())

    def has_name(self) -> bool:
        """Return whether who looks for a mover finds this one."""
        try:
            return os.stat(self.path).st_ino == self._inode
        except OSError:
            return False


@contextlib.contextmanager
def starting(path: Path) -> Iterator[None]:
    """Hold the lock under which movers come up."""
    fd = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def main(argv: list[str]) -> int:
    """Run the mover for a user; returns the exit code."""
    verbs = all_verbs()
    with contextlib.suppress(Exception):  # it is asked for again, and says then what is missing
        binding.load_binding()
    for variable in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        os.environ.pop(variable, None)
    begin(NAME, int(argv[0]))
    path = socket_path("mover", os.geteuid())
    with starting(path):  # of several that are started at once the first stays
        if look_for("mover", os.geteuid()) is not None:
            return 0
        mover = MoverServer(str(path), verbs)
    listens()

    def told(number: int, frame: object) -> None:
        mover.shared.retiring = True

    signal.signal(signal.SIGTERM, told)
    mover.serve()
    return 0
