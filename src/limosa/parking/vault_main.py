"""The vault: a small process without CUDA that holds descriptors, so that bytes outlive the process that moves them.

Started by :mod:`limosa.parking.resident` for the user whose jobs it is for. Device memory lives as long as somebody has
a descriptor of it; a driver error cannot end a process that makes no driver calls. It ends when it has held nothing for
a while.

Its requests are in :mod:`limosa.parking.vault_protocol`. A key is there as a whole or not at all: a put that is broken
off is forgotten. If it cannot do something, it says so (``error``) and goes on, because it holds others' memory.
Released segments are kept for the next suspend, unless the process that had them has ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from limosa.errors import LimosaError
from limosa.ipc.messages import VERSION, Message
from limosa.ipc.packet import Given
from limosa.ipc.sessions import Answer, Sessions, listen
from limosa.parking.resident import socket_path
from limosa.parking.resident_main import begin, listens
from limosa.parking.segments import NoRoom, Pool, is_segment
from limosa.parking.vault_protocol import NO_ROOM, AskArena, Asked, Drop, Get, Keys, Ping, Put, Reserve, Segments
from limosa.process.identity import Identity
from limosa.process.places import keep_from_cleaners

LOOK_SECONDS = 2.0
LISTEN_SECONDS = 1.0
IDLE_SECONDS = float(os.environ.get("LIMOSA_VAULT_IDLE", "60"))
KEEP_SECONDS = float(os.environ.get("LIMOSA_ARENA_IDLE", "600"))
"""How long segments that nobody uses are kept."""
ARENA = "aside/"
"""What the keys of those begin with that have segments of the arena."""


class Entry:
    """What is held under one key."""

    def __init__(self, note: bytes = b""):
        self.note = note
        self.fds: list[int] = []

    def close(self, close: Callable[[int], None] = os.close) -> None:
        """Let go of all of it."""
        for fd in self.fds:
            close(fd)
        self.fds.clear()

    def segments(self) -> int:
        """Return how many bytes of the arena are among it."""
        return sum(os.fstat(fd).st_size for fd in self.fds if is_segment(fd))


class Lending:
    """Descriptors that are just being sent, without a lock: they are closed when that is over, not before.

    A number that is closed is the next one's: somebody would get another's memory.
    """

    def __init__(self) -> None:
        self._lent: Counter[int] = Counter()
        self._to_close: set[int] = set()

    def close(self, fd: int) -> None:
        """Close a descriptor, now or as soon as it is not lent any more."""
        if self._lent[fd]:
            self._to_close.add(fd)
        else:
            os.close(fd)

    def lend(self, fds: Sequence[int]) -> None:
        """They are to be sent."""
        self._lent.update(fds)

    def back(self, fds: Sequence[int]) -> None:
        """They were."""
        self._lent.subtract(fds)
        for fd in [fd for fd in fds if not self._lent[fd]]:
            del self._lent[fd]
            if fd in self._to_close:
                self._to_close.remove(fd)
                os.close(fd)


def let_ended_go(held: dict[str, Entry], close: Callable[[int], None] = os.close) -> None:
    """All is held for a process ("…/PID@START"): where that has ended, nobody comes back for it."""
    for key in list(held):
        try:
            alive = Identity.from_str(key.rpartition("/")[2]).alive()
        except (LimosaError, OSError):
            continue  # not of a process: until it is told to let go; or nobody can be looked at now
        if not alive:
            held.pop(key).close(close)


class VaultServer:
    """Everything that is held, and the answers about it."""

    def __init__(self) -> None:
        self.held: dict[str, Entry] = {}
        self.lending = Lending()
        self.pool = Pool(self.lending.close)
        self.last = time.monotonic()
        """When it last held something, or somebody other than one who only looks was there."""
        self.lock = threading.Lock()
        """Held by whoever looks at what is held, or changes it."""

    def used(self) -> int:
        """Return how many bytes of the arena are in use."""
        return sum(entry.segments() for key, entry in self.held.items() if key.startswith(ARENA))

    def let_go(self, key: str, again: bool = False) -> int:
        """Let go of a key; returns how many descriptors it held.

        ``again``: segments of the arena may be another's: nobody writes to them or reads them any more.
        """
        entry = self.held.pop(key, Entry())
        n = len(entry.fds)
        if again and key.startswith(ARENA):
            self.pool.give_back(entry.fds)
        else:
            entry.close(self.lending.close)
        return n

    def answer(self, asked: Asked, fds: Given) -> tuple[dict[str, Any], list[int]]:
        """Do what is asked; what is taken of the descriptors is the vault's.

        Returns what is said, and descriptors to go with it, which stay the vault's. Raises NoRoom: the arena may not
        grow so far.
        """
        match asked:
            case Put(key, n, note):
                if len(fds) != n:  # what is held so far may be the last copy
                    return {"error": f"{len(fds)} descriptors came of {n}"}, []
                return {"n": self.put(key, note, fds.take())}, []
            case Get(key):
                found = self.held.get(key)
                if found is None:
                    return {"error": f"nothing is held as {key}", "there": False}, []
                return {"note": found.note, "n": len(found.fds)}, found.fds
            case Drop(key, again):
                return {"n": self.let_go(key, again)}, []
            case Keys():
                return {"keys": {name: len(entry.fds) for name, entry in self.held.items()}}, []
            case Ping():
                return {"pid": os.getpid(), "version": VERSION}, []
            case Segments(key, sizes, cap, again):
                return {}, self.segments(key, sizes, cap, again)
            case Reserve(bytes_, seconds, cap):
                self.pool.reserve(bytes_, time.monotonic() + seconds, self.used(), cap)
                return {}, []
            case AskArena(with_free=with_free):
                return self.arena(), [fd for fd, _, _ in self.pool.free] if with_free else []

    def put(self, key: str, note: bytes, fds: list[int]) -> int:
        """Hold descriptors under a key; what it held before is let go of then. Returns how many."""
        entry = Entry(note)
        entry.fds = fds
        before, self.held[key] = self.held.get(key), entry
        if before is not None:
            before.close(self.lending.close)
        return len(entry.fds)

    def segments(self, key: str, sizes: list[int], cap: int, again: bool) -> list[int]:
        """Make segments a key's; what it had does not count, and may be among them.

        Raises NoRoom: the arena may not grow so far; the key has what it had.
        """
        before = self.held.get(key, Entry())
        own = [fd for fd in before.fds if again and key.startswith(ARENA) and is_segment(fd)]
        had = before.segments() if key.startswith(ARENA) else 0
        self.pool.lend(own)
        try:
            taken = self.pool.take(sizes, self.used() - had, cap)
        except BaseException:
            self.pool.take_back(own)
            raise
        before.fds = [fd for fd in before.fds if fd not in own]
        before.close(self.lending.close)
        self.held[key] = Entry()
        self.held[key].fds = taken
        return taken

    def arena(self) -> dict[str, Any]:
        """Return what there is of the arena."""
        free = [fd for fd, _, _ in self.pool.free]
        there = [fd for name, entry in self.held.items() if name.startswith(ARENA) for fd in entry.fds]
        return {
            "used": self.used(),
            "free": self.pool.bytes(),
            "reserved": self.pool.reserved,
            "seconds": max(0.0, self.pool.until - time.monotonic()) if self.pool.reserved else 0.0,
            "by": {name: entry.segments() for name, entry in self.held.items() if name.startswith(ARENA)},
            "inodes": [os.fstat(fd).st_ino for fd in (*there, *free)],
        }

    def look(self) -> None:
        """Let go of what is held for processes that have ended, and of what of the arena has long been free."""
        if self.held.keys() or self.pool.free:
            self.last = time.monotonic()
        let_ended_go(self.held, self.lending.close)
        self.pool.trim(self.used(), KEEP_SECONDS)


class VaultSession:
    """One client of the vault; what it is told is looked up and done while nobody else's is."""

    def __init__(self, vault: VaultServer):
        self._vault = vault
        self._needed = False

    def answer(self, message: Message, came: Given) -> Answer:
        """Do what is asked."""
        vault = self._vault
        with vault.lock:
            try:
                asked: Asked = message.read_as(Asked)  # type: ignore[arg-type]
                self._needed |= not asked.looks
                said, given = vault.answer(asked, came)
            except NoRoom:
                return Answer({"error": NO_ROOM, "used": vault.used()})
            except Exception as error:  # whatever it was: what is held here is the last copy of somebody's memory
                return Answer({"error": f"{type(error).__name__}: {error}"[:1000]})
            fds = tuple(given)
            vault.lending.lend(fds)
        return Answer(said, fds, self._sent)

    def _sent(self, fds: Sequence[int]) -> None:
        with self._vault.lock:
            self._vault.lending.back(fds)

    def gone(self) -> None:
        """What it had put stays."""
        if self._needed:
            self._vault.last = time.monotonic()


def run(path: str, told: threading.Event) -> None:
    """Answer until nothing has been held, and nobody has used it, for ``IDLE_SECONDS``.

    ``told`` is set to have it end as soon as it holds nothing and nobody is connected.
    """
    # Whoever has the lock is the vault; a socket that is there is of one that was killed.
    guard = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    listening = listen(path)
    listens()
    vault = VaultServer()
    clients = Sessions(lambda: VaultSession(vault))
    looked = time.monotonic()

    def is_needed() -> bool:
        # In this order: a client may put something and go between the two.
        if clients or vault.held:
            return True  # whoever asks it to end waits until nobody's bytes end with it
        return not told.is_set() and (bool(vault.pool.free) or time.monotonic() - vault.last < IDLE_SECONDS)

    with selectors.DefaultSelector() as ready:
        ready.register(listening, selectors.EVENT_READ)
        while is_needed():
            ready.select(LISTEN_SECONDS)
            clients.accept(listening)
            now = time.monotonic()
            if now - looked > LOOK_SECONDS:
                with vault.lock:
                    vault.look()
                looked = now
    # Whoever connects from here on is refused, and starts another: the name goes first.
    os.unlink(path)
    listening.close()


def main(argv: list[str]) -> int:
    """Run the vault for a user; returns the exit code."""
    told = threading.Event()
    begin("limosa-vault", int(argv[0]), [signal.SIGTERM])
    signal.signal(signal.SIGTERM, lambda number, frame: told.set())
    path = socket_path("vault", os.geteuid())
    with contextlib.suppress(LimosaError, OSError):  # as long as there is a vault: the records are of what it holds
        keep_from_cleaners()
    run(str(path), told)
    return 0
