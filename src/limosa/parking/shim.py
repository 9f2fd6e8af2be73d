"""One process under the shim, asked over its control socket.

Every answer is waited for with a limit: the shim's thread does not wait for the application's, but the driver may hang.
"""

from __future__ import annotations

import array
import errno
import os
import socket
import struct
import time
from collections.abc import Sequence
from types import TracebackType

import msgspec

from limosa.errors import LimosaError, NoSuchProcess
from limosa.gpu.names import uuid_of_bytes
from limosa.parking import LIBRARY
from limosa.parking.packets import peer
from limosa.parking.protocol import (
    AWAY,
    CAPTURING,
    COUNT_KINDS,
    COUNTS,
    IMPORTED,
    MAGIC,
    MAPPED,
    MESSAGE,
    MOST,
    NOT_READY,
    PAIR,
    PLAIN,
    RECORD,
    SHARED,
    VERSION,
    Role,
    Stand,
    Verb,
)
from limosa.process.identity import Identity

ANSWER_SECONDS = 10.0
WORK_SECONDS = 60.0
"""For an answer after the driver has mapped, or unmapped, all there is, or the memory for its halves is let go of."""
CONNECT_SECONDS = 3.0
AGAIN_SECONDS = 1.0
_silent: set[Identity] = set()
"""Processes that have let this program wait in vain, and have not answered since."""
SLOWEST_TOUCH = 0.5e9
"""Bytes of host memory a second; a virtual machine whose memory is backed at first use was measured at 2.7e9."""
MAP_STEPS = {1: "import", 2: "map", 3: "access"}


def under_shim(pid: int) -> bool:
    """Return whether a process has the shim's library mapped, be it one that was replaced by a newer since."""
    name = b"/" + LIBRARY.name.encode()
    try:
        with open(f"/proc/{pid}/maps", "rb") as file:
            return any(line.rstrip().removesuffix(b" (deleted)").endswith(name) for line in file)
    except OSError:
        return False


def _users(pid: int) -> list[int]:
    """The user ids that a process has: real, effective, saved, of the file system."""
    with open(f"/proc/{pid}/status", "rb") as file:
        return next([int(word) for word in line.split()[1:]] for line in file if line.startswith(b"Uid:"))


class ShimError(LimosaError):
    """The shim did not do what it was asked; ``fields["result"]`` is a CUresult, or minus an errno."""

    id, exit_code, template = "shim", 21, "process {pid}: {what}: {detail}"


class GateStaysOpen(ShimError):
    """The gate could not be closed in time; it is open again and the job runs on."""

    id, exit_code = "gate", 18
    template = "process {pid} could not be held still within {seconds:g} s: {detail}"


class Memory(msgspec.Struct, frozen=True):
    """One piece of device memory that the shim looks after.

    Attributes:
        id: its number in that process, never used twice.
        bytes: physical size, a multiple of 2 MiB.
        device: the process's number of its GPU.
        at: the address where it is first mapped, 0 where it is not.
        plain: whether it is of cuMemAlloc (else of cuMemCreate).
        shared: whether somebody whom nobody knows was given it; such memory stays with the driver.
        away: whether it is not there at the moment.
        imported: whether it came by the parked way, or from another process: the driver could save it, and not bring
            it back.
        share: the number under which several processes have it (legacy IPC handles); 0: this one alone.
        owner: the pid of the process that gave it, where another did (-1: nobody knows which); else 0.
    """

    id: int
    bytes: int
    device: int
    at: int = 0
    plain: bool = False
    shared: bool = False
    away: bool = False
    imported: bool = False
    share: int = 0
    owner: int = 0


class Called(msgspec.Struct, frozen=True):
    """A function of the driver that a process called or asked for, and what the shim knows of it."""

    name: str
    role: Role
    called: bool
    asked_for: bool


class Hello(msgspec.Struct, frozen=True):
    """What a process says of itself: where it stands, its pieces of memory, the bytes that can be parked."""

    stand: Stand
    n_memories: int
    bytes: int


class Shim:
    """A connection to one process; one client at a time has it.

    Args:
        identity: the process.
        limit: seconds for an answer.
        patience: seconds until it has to have a socket.

    Attributes:
        owner: whose process it is: his vault and his mover serve it.

    Raises:
        NoSuchProcess: it has ended.
        ShimError: it does not run under the shim, or belongs to somebody else.
    """

    def __init__(self, identity: Identity, limit: float | None = None, patience: float | None = None):
        self.identity, self._number, self._lost = identity, 0, False
        self.limit = ANSWER_SECONDS if limit is None else limit
        self._connect(CONNECT_SECONDS if patience is None else patience)

    @classmethod
    def to_look(cls, identity: Identity) -> Shim:
        """Connect before anything is done to a process: one that has not answered is not waited for as long again.

        A verb looks several times before it begins.
        """
        return cls(identity, AGAIN_SECONDS, 0.0) if identity in _silent else cls(identity)

    def _connect(self, patience: float) -> None:
        identity, limit = self.identity, self.limit
        end = time.monotonic() + patience
        while True:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
            self._socket.settimeout(limit)
            try:
                self._socket.connect(f"\0limosa/shim/{identity.pid}")
                identity.check()
                self.owner = self._is_itself()
                return
            except OSError as error:
                self._socket.close()
                if not identity.alive():
                    raise NoSuchProcess(pid=identity.pid) from None
                # Another client, or one that has just come up, may keep us waiting; what is no shim's is no shim's.
                preloaded = under_shim(identity.pid)
                if not preloaded or time.monotonic() > end:
                    if preloaded:
                        _silent.add(identity)
                    raise self._error("connect", error) from error
            except BaseException:
                self._socket.close()
                raise
            time.sleep(0.02)

    def _is_itself(self) -> int:
        """Whose the process at the other end is, if it is this one: anybody may take a name that is free."""
        pid, uid = peer(self._socket)
        users = _users(pid)
        if pid != self.identity.pid or uid not in {0, *users}:
            raise PermissionError(errno.EACCES, f"process {pid} of user {uid} has its name")
        return uid if uid in users else users[0]  # what root brought back from an image listens as root

    def hello(self) -> Hello:
        """Return where it stands."""
        _, a, _, c, d = self._ask(Verb.HELLO)
        return Hello(Stand(a), c, d)

    def memories(self) -> list[Memory]:
        """Return all that the shim looks after, by id."""
        self._send(Verb.LIST)
        found: list[Memory] = []
        while True:
            (_, total, here, _, _), data, _ = self._receive(Verb.LIST)
            found += [self._memory(data, i) for i in range(here)]
            if len(found) >= total:
                return found

    def export(self, ids: Sequence[int]) -> list[int]:
        """Return descriptors of these pieces, in their order; the caller closes them."""
        return self._handed_out(Verb.EXPORT, ids)

    def make(self, ids: Sequence[int]) -> list[int]:
        """Have pieces that are away made anew by the process itself, and return descriptors of what was made.

        On a GPU that it did not see when it began (:meth:`sees`) it can import nothing. What was made is filled by
        whoever has the descriptors, and mapped by :meth:`map` without any; :meth:`unmap` and :meth:`open_gate` let go
        of what was not. The caller closes the descriptors.
        """
        return self._handed_out(Verb.MAKE, ids)

    def _handed_out(self, verb: Verb, ids: Sequence[int]) -> list[int]:
        found: list[int] = []
        try:
            for start in range(0, len(ids), MOST):
                some = ids[start : start + MOST]
                self._send(verb, ids=some)
                _, _, fds = self._receive(verb)
                found += fds
                if len(fds) != len(some):
                    raise self._error(verb.name.lower(), f"{len(fds)} descriptors came for {len(some)}")
        except BaseException:
            for fd in found:
                os.close(fd)
            raise
        return found

    def close_gate(self, seconds: float) -> None:
        """Hold the process still: no call is in the driver, all work is done.

        Raises:
            GateStaysOpen: not within that time; it is open again.
        """
        try:
            self._ask(Verb.CLOSE, int(seconds * 1000), limit=seconds + self.limit)
        except ShimError as error:
            result = error.fields.get("result")
            if result in (NOT_READY, CAPTURING):
                why = "it is capturing a CUDA graph" if result == CAPTURING else "work on the GPU, or a call, goes on"
                raise GateStaysOpen(
                    pid=self.identity.pid, seconds=round(seconds, 1), what="close", detail=why, result=result,
                    hint="try again: what it has begun has to come to an end meanwhile",
                ) from None  # fmt: skip
            raise

    def open_gate(self) -> None:
        """Let it go on; all memory must be there."""
        self._ask(Verb.OPEN)

    def unmap(self) -> Stand:
        """Take all that can be parked out of its address space and let it go: who has descriptors has the contents."""
        return Stand(self._ask(Verb.UNMAP, limit=WORK_SECONDS)[1])

    def map(self, ids: Sequence[int], fds: Sequence[int] = ()) -> Stand:
        """Give it memory back: imported and mapped where it was. The descriptors stay the caller's.

        Pieces that have not left (an unmap that failed in the middle), or were made anew by :meth:`make`, are told
        without descriptors.
        """
        stand = Stand.AWAY
        for start in range(0, len(ids), MOST):
            self._send(Verb.MAP, ids=ids[start : start + MOST], fds=fds[start : start + MOST])
            stand = Stand(self._receive(Verb.MAP, limit=WORK_SECONDS)[0][1])
        return stand

    def stack(self, bytes_: int) -> None:
        """Lower the stack limit of its contexts for the checkpoint; 0: back to what it was."""
        self._ask(Verb.STACK, bytes_)

    def bulk(self, bytes_: int) -> int:
        """Have memory ready for what the driver saves itself (0: none); returns what it asked for the last time."""
        return self._ask(Verb.BULK, bytes_, limit=WORK_SECONDS + bytes_ / SLOWEST_TOUCH)[3]

    def keep(self, fds: Sequence[int] = ()) -> None:
        """Have the process itself hold descriptors while its memory is away; none: let go of those."""
        for start in range(0, max(1, len(fds)), MOST):
            self._send(Verb.KEEP, a=start, fds=fds[start : start + MOST])
            self._receive(Verb.KEEP)

    def kept(self) -> list[int]:
        """Return those descriptors, which are the caller's to close."""
        found: list[int] = []
        while True:
            self._send(Verb.KEPT, a=len(found))
            (_, total, _, _, _), _, fds = self._receive(Verb.KEPT)
            found += fds
            if len(found) >= total or not fds:
                return found

    def devices(self) -> list[str]:
        """Return the UUIDs of its GPUs, by its own numbers, as they are now."""
        return self._gpus(0)[0]

    def sees(self, uuid: str) -> bool:
        """Return whether it saw a GPU when it initialised the driver: of others it cannot import memory."""
        return uuid in self.saw()

    def saw(self) -> list[str]:
        """Return the UUIDs of the GPUs that it saw when it initialised the driver, which is not asked for it."""
        return self._gpus(1)[1]

    def _gpus(self, first: int) -> tuple[list[str], list[str]]:
        self._send(Verb.DEVICES, first)
        (_, n, first, _, _), data, _ = self._receive(Verb.DEVICES)
        uuids = [uuid_of_bytes(data[16 * i : 16 * i + 16]) for i in range(n + first)]
        return uuids[:n], uuids[n:]

    def counts(self) -> dict[str, tuple[int, int]]:
        """Return what is left to the driver now: kind → pieces, bytes (``native/shim/memory.h`` has the kinds)."""
        self._send(Verb.COUNTS)
        _, data, _ = self._receive(Verb.COUNTS)
        values = COUNTS.unpack_from(data)
        n = len(COUNT_KINDS)
        return {kind: (values[i], values[n + i]) for i, kind in enumerate(COUNT_KINDS)}

    def called(self) -> list[Called]:
        """Return every function of the driver that was called or asked for, by name."""
        self._send(Verb.CALLED)
        found: list[Called] = []
        while True:
            (_, total, here, _, _), data, _ = self._receive(Verb.CALLED)
            parts = data
            for _ in range(here):
                text, _, parts_left = parts[2:].partition(b"\0")
                done = parts[1]
                found.append(Called(text.decode(), Role(parts[0]), called=bool(done & 1), asked_for=bool(done & 2)))
                parts = parts_left
            if len(found) >= total:
                return sorted(found, key=lambda one: one.name)

    def sharers(self) -> dict[int, set[int]]:
        """Return whom its memory was given by legacy IPC handles: share → pids; some may have closed it since."""
        self._send(Verb.SHARERS)
        found: dict[int, set[int]] = {}
        seen = 0
        while True:
            (_, total, here, _, _), data, _ = self._receive(Verb.SHARERS)
            for i in range(here):
                share, pid = PAIR.unpack_from(data, i * PAIR.size)
                found.setdefault(share, set()).add(pid)
            seen += here
            if seen >= total:
                return found

    def close(self) -> None:
        """Let another client have it."""
        self._socket.close()

    def __enter__(self) -> Shim:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, verb: Verb, a: int = 0, limit: float | None = None) -> tuple[int, int, int, int, int]:
        self._send(verb, a)
        return self._receive(verb, limit)[0]

    def _send(self, verb: Verb, a: int = 0, ids: Sequence[int] = (), fds: Sequence[int] = ()) -> None:
        if self._lost:  # an answer that was not waited for any more would be taken for this one's
            self._socket.close()
            self._connect(CONNECT_SECONDS)
            self._lost = False
        self._number += 1
        parts = [MESSAGE.pack(MAGIC, VERSION, verb, self._number, 0, a, 0, 0, 0), struct.pack(f"={len(ids)}Q", *ids)]
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            self._socket.sendmsg(parts, rights)
        except OSError as error:
            self._lost = True
            raise self._error(verb.name.lower(), error) from error

    def _receive(
        self, verb: Verb, limit: float | None = None
    ) -> tuple[tuple[int, int, int, int, int], bytes, list[int]]:
        self._socket.settimeout(self.limit if limit is None else limit)
        fds: list[int] = []
        try:
            data, rights, _, _ = self._socket.recvmsg(1 << 16, socket.CMSG_SPACE(MOST * 4))
        except OSError as error:
            self._lost = True
            if isinstance(error, TimeoutError):
                _silent.add(self.identity)
            raise self._error(verb.name.lower(), error) from error
        _silent.discard(self.identity)
        for level, kind, value in rights:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds += array.array("i", value[: len(value) // 4 * 4])
        for fd in fds:
            os.set_inheritable(fd, False)
        try:
            if len(data) < MESSAGE.size:
                self._lost = True
                raise self._error(verb.name.lower(), "it has gone")
            magic, version, said, number, result, a, b, c, d = MESSAGE.unpack_from(data)
            if (magic, version, said, number) != (MAGIC, VERSION, verb, self._number):
                raise self._error(verb.name.lower(), "another version of the shim", result)
            if result:
                text = os.strerror(-result) if result < 0 else f"CUresult {result}"
                if verb is Verb.MAP and result > 0 and d & 255:
                    text += f" ({MAP_STEPS.get(d & 255, '?')}, device {d >> 16})"
                raise self._error(verb.name.lower(), text, result)
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        return (result, a, b, c, d), data[MESSAGE.size :], fds

    def _memory(self, data: bytes, i: int) -> Memory:
        id_, bytes_, at, share, device, flags, owner, _ = RECORD.unpack_from(data, i * RECORD.size)
        return Memory(
            id_,
            bytes_,
            device,
            at if flags & MAPPED else 0,
            plain=bool(flags & PLAIN),
            shared=bool(flags & SHARED),
            away=bool(flags & AWAY),
            imported=bool(flags & IMPORTED),
            share=share,
            owner=owner,
        )

    def _error(self, what: str, detail: object, result: int = 0) -> ShimError:
        text = detail.strerror if isinstance(detail, OSError) and detail.strerror else str(detail)
        return ShimError(pid=self.identity.pid, what=what, detail=text, result=result)
