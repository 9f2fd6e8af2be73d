"""The vault: a small process without CUDA that holds descriptors, so that bytes outlive whoever moves them.

Started by :mod:`limosa.parking.resident` for the user whose jobs it is for. Device memory lives as long as somebody has
a descriptor of it; a driver error cannot end a process that makes no driver calls. It ends when it has held nothing for
a while.

What it is asked has a type each, below. A key is there as a whole or not at all: a put that is broken off is forgotten.
What it cannot do it says (``error``), and goes on: others' memory is held here.
Segments that are let go of are kept for the next, unless the process that had them has ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import signal
import socket
import threading
import time
from typing import Annotated, Any

import msgspec

from limosa.errors import LimosaError
from limosa.parking.packets import (
    MOST_DESCRIPTORS,
    VERSION,
    Count,
    Message,
    Note,
    Numbers,
    Seconds,
    Word,
    peer,
    receive,
    send_all,
)
from limosa.parking.receive import Given, Wrong
from limosa.parking.resident import socket_path
from limosa.parking.resident_main import begin, listens
from limosa.parking.segments import NoRoom, Pool, is_segment
from limosa.parking.vault import NO_ROOM
from limosa.process.identity import Identity
from limosa.process.places import keep_from_cleaners

LOOK_SECONDS = 2.0
IDLE_SECONDS = float(os.environ.get("LIMOSA_VAULT_IDLE", "60"))
KEEP_SECONDS = float(os.environ.get("LIMOSA_ARENA_IDLE", "600"))
"""How long segments that nobody uses are kept."""
ARENA = "aside/"
"""What the keys of those begin with that have segments of the arena."""


class Put(msgspec.Struct, tag_field="verb", tag="put"):
    """Hold the descriptors, which are so many, under a key, instead of what it held."""

    key: Word
    n: Count
    note: Note = b""


class Get(msgspec.Struct, tag_field="verb", tag="get"):
    """Give what a key holds."""

    key: Word


class Drop(msgspec.Struct, tag_field="verb", tag="drop"):
    """Let go of a key."""

    key: Word
    again: bool = False


class Keys(msgspec.Struct, tag_field="verb", tag="keys"):
    """Say what is held."""


class Ping(msgspec.Struct, tag_field="verb", tag="ping"):
    """Say who you are."""


class Segments(msgspec.Struct, tag_field="verb", tag="segments"):
    """Make segments of the arena a key's."""

    key: Word
    sizes: Numbers
    cap: Count
    again: bool = False


class Reserve(msgspec.Struct, tag_field="verb", tag="reserve"):
    """Have the arena so large for so long."""

    bytes: Annotated[int, msgspec.Meta(ge=0, le=1 << 46)]
    seconds: Seconds
    cap: Count


class Arena(msgspec.Struct, tag_field="verb", tag="arena"):
    """Say what there is of the arena, and give what is free of it."""

    with_free: bool = False


Asked = Put | Get | Drop | Keys | Ping | Segments | Reserve | Arena


class Entry:
    """What is held under one key."""

    def __init__(self, note: bytes = b""):
        self.note = note
        self.fds: list[int] = []

    def close(self) -> None:
        """Let go of all of it."""
        for fd in self.fds:
            os.close(fd)
        self.fds.clear()

    def segments(self) -> int:
        """Return how many bytes of the arena are among it."""
        return sum(os.fstat(fd).st_size for fd in self.fds if is_segment(fd))


def let_ended_go(held: dict[str, Entry]) -> None:
    """All is held for a process ("…/PID@START"): where that has ended, nobody comes back for it."""
    for key in list(held):
        try:
            alive = Identity.from_str(key.rpartition("/")[2]).alive()
        except (LimosaError, OSError):
            continue  # not of a process: until it is told to let go; or nobody can be looked at now
        if not alive:
            held.pop(key).close()


class Vault:
    """Everything that is held, and the answers about it."""

    def __init__(self) -> None:
        self.held: dict[str, Entry] = {}
        self.coming: dict[socket.socket, Given] = {}
        self.pool = Pool()

    def used(self) -> int:
        """Return how many bytes of the arena are in use."""
        return sum(entry.segments() for key, entry in self.held.items() if key.startswith(ARENA))

    def let_go(self, key: str, again: bool = False) -> int:
        """Let go of a key; returns how many descriptors it held.

        Args:
            key: what it is held as.
            again: whether segments of the arena may be another's: nobody writes to them or reads them any more.
        """
        entry = self.held.pop(key, Entry())
        n = len(entry.fds)
        if again and key.startswith(ARENA):
            self.pool.give_back(entry.fds)
        else:
            entry.close()
        return n

    def take(self, client: socket.socket, message: Message) -> None:
        """Do what a packet asks once the last of a message is there, and say so; its descriptors are the vault's.

        Raises:
            OSError: the client cannot be told.
            Wrong: more descriptors than there may be.
        """
        coming = self.coming.setdefault(client, Given())
        coming.add(message.given)
        if len(coming) > MOST_DESCRIPTORS:
            raise Wrong("too many descriptors")
        if message.more:
            return
        del self.coming[client]
        with coming:
            try:
                said, given = self.answer(message.read_as(Asked), coming)  # type: ignore[arg-type]
            except NoRoom:
                said, given = {"error": NO_ROOM, "used": self.used()}, []
            except Exception as error:  # whatever it was: what is held here is the last copy of somebody's memory
                said, given = {"error": f"{type(error).__name__}: {error}"[:1000]}, []
        send_all(client, said, given)

    def answer(self, asked: Asked, fds: Given) -> tuple[dict[str, Any], list[int]]:
        """Do what is asked; what is taken of the descriptors is the vault's.

        Returns:
            What is said, and descriptors to go with it, which stay the vault's.

        Raises:
            NoRoom: the arena may not grow so far.
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
            case Arena(with_free):
                return self.arena(), [fd for fd, _, _ in self.pool.free] if with_free else []

    def put(self, key: str, note: bytes, fds: list[int]) -> int:
        """Hold descriptors under a key; what it held before is let go of then. Returns how many."""
        entry = Entry(note)
        entry.fds = fds
        before, self.held[key] = self.held.get(key), entry
        if before is not None:
            before.close()
        return len(entry.fds)

    def segments(self, key: str, sizes: list[int], cap: int, again: bool) -> list[int]:
        """Make segments a key's; what it had does not count, and may be among them.

        Raises:
            NoRoom: the arena may not grow so far; the key has what it had.
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
        before.close()
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
        let_ended_go(self.held)
        self.pool.trim(self.used(), KEEP_SECONDS)

    def forget(self, client: socket.socket) -> None:
        """A client has gone: what it had not finished is forgotten."""
        self.coming.pop(client, Given()).close()


def serve(path: str, told: threading.Event) -> None:
    """Answer until nothing has been held, and nobody has asked, for ``IDLE_SECONDS``.

    Args:
        path: where it listens.
        told: set to have it end as soon as it holds nothing and nobody is connected.
    """
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    # Whoever has the lock is the vault; a socket that is there is of one that was killed.
    guard = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    listening.bind(path)
    os.chmod(path, 0o600)
    listening.listen(64)
    listens()
    vault, last, looked = Vault(), time.monotonic(), time.monotonic()

    def is_needed() -> bool:
        if vault.held or len(ready.get_map()) > 1:
            return True  # whoever asks it to end waits until nobody's bytes end with it
        return not told.is_set() and (bool(vault.pool.free) or time.monotonic() - last < IDLE_SECONDS)

    with selectors.DefaultSelector() as ready:
        ready.register(listening, selectors.EVENT_READ)
        while is_needed():
            if time.monotonic() - looked > LOOK_SECONDS:
                vault.look()
                looked = time.monotonic()
            for key, _ in ready.select(1.0):
                last = time.monotonic()
                if key.fileobj is listening:
                    try:
                        client, _ = listening.accept()
                    except OSError:  # no descriptor left for it
                        time.sleep(0.05)
                        continue
                    if peer(client)[1] in (0, os.geteuid()):
                        client.settimeout(10)
                        ready.register(client, selectors.EVENT_READ)
                    else:
                        client.close()
                    continue
                client = key.fileobj  # type: ignore[assignment]
                try:
                    vault.take(client, receive(client))
                except (EOFError, OSError, ValueError):
                    vault.forget(client)
                    ready.unregister(client)
                    client.close()
    # Whoever connects from here on is refused, and starts another: the name goes first.
    os.unlink(path)
    listening.close()


def main(argv: list[str]) -> int:
    """Run the vault.

    Args:
        argv: the user whose jobs it is for.

    Returns:
        The exit code.
    """
    told = threading.Event()
    begin("limosa-vault", int(argv[0]), [signal.SIGTERM])
    signal.signal(signal.SIGTERM, lambda number, frame: told.set())
    path = socket_path("vault", os.geteuid())
    with contextlib.suppress(LimosaError, OSError):  # as long as there is a vault: the records are of what it holds
        keep_from_cleaners()
    serve(str(path), told)
    return 0
