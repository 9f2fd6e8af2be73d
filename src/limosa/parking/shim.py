"""One process under the shim, asked over its control socket.

Every wait for an answer has a limit: the shim's thread does not wait for the application's, but the driver may hang.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import struct
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from limosa.errors import LimosaError, NoSuchProcess
from limosa.gpu.names import uuid_bytes
from limosa.ipc.packet import Deadline, Given, Wrong, hang_up, peer, receive, send
from limosa.parking import LIBRARY, answers
from limosa.parking.answers import MOST_BYTES, Called, Comm, CommsLook, Counted, Hello, Memory, Message, Want
from limosa.parking.names import names_of
from limosa.parking.patience import Patience
from limosa.parking.protocol import (
    CAPTURING,
    JOIN,
    KEPT_MOST,
    LIMIT,
    MAGIC,
    MESSAGE,
    MOST,
    MOST_JOINS,
    NOT_READY,
    PLACE,
    PLACES_MOST,
    UNIQUE_ID,
    VERSION,
    Kind,
    Stand,
    Verb,
)
from limosa.parking.reach import connect
from limosa.process.candidates import MOST_OF_MAPS
from limosa.process.identity import Identity
from limosa.process.namespaces import Pids, is_ours
from limosa.process.slurp import pieces
from limosa.process.status import uids_of

ANSWER_SECONDS = 10.0
WORK_SECONDS = 60.0
"""For an answer after the driver has mapped, or unmapped, all there is, or the memory for its halves is let go of."""
CONNECT_SECONDS = 3.0
AGAIN_SECONDS = 1.0
_silent: set[Identity] = set()
"""Processes that have let this program wait in vain, and have not answered since."""
PIECE_SECONDS = 0.01
SLOWEST_TOUCH = 0.5e9
"""Bytes of host memory a second; a virtual machine whose memory is backed at first use was measured at 2.7e9."""
MAP_STEPS = {1: "import", 2: "map", 3: "access"}
LOOK_SECONDS = 12.0
"""How long whoever only looks waits for one user's processes together."""
MOST_PIECES = 1 << 18
MOST_CALLED = 1 << 13
MOST_SHARERS = 1 << 16
MOST_COMMS = 4096
MOST_PAIRS = 1 << 16
"""Of ranks that have sent to each other."""
_PACKET = 1 << 16
_patience = Patience(LOOK_SECONDS)
_T = TypeVar("_T")


# As it is; replaced by a newer one; and so when CRIU restored the process, which brings back what is gone as a "ghost".
_MAPPED = re.compile(rb"/" + re.escape(LIBRARY.name.encode()) + rb"(\.cr\.[0-9a-f]+\.ghost)?( \(deleted\))?$", re.M)


def under_shim(pid: int) -> bool:
    """Return whether a process has the shim's library mapped, be it one that was replaced by a newer since."""
    try:
        read = 0
        for some in pieces(f"/proc/{pid}/maps"):
            if _MAPPED.search(some) or (read := read + len(some)) > MOST_OF_MAPS:
                return True  # more than there can be of an ordinary one: it is asked
        return False
    except OSError:
        return False


_OF_NCCL = {
    Verb.SHUT: "closing its communicators",
    Verb.IDS: "ncclGetUniqueId",
    Verb.JOIN: "making its communicators again",
}
"""What is asked of NCCL: its numbers of what went wrong are others than the driver's."""
_NCCL_RESULTS = ("UnhandledCudaError", "SystemError", "InternalError", "InvalidArgument", "InvalidUsage", "RemoteError")


def _result(verb: Verb, result: int) -> str:
    if verb not in _OF_NCCL:
        return f"CUresult {result}"
    return f"nccl{_NCCL_RESULTS[result - 1]}" if result <= len(_NCCL_RESULTS) else f"ncclResult {result}"


class ShimError(LimosaError):
    """The shim did not do what it was asked; ``fields["result"]`` is a CUresult, or minus an errno."""

    id, exit_code, template = "shim", 21, "process {pid}: {what}: {detail}"


class Place(NamedTuple):
    """One GPU that a process could open: where it was before an operation, and where it is now."""

    was: str  # UUID
    is_: str  # UUID
    pci: str  # bus id of where it is, ``DDDDDDDD:BB:DD.F``

    def packed(self) -> bytes:
        """Return it as the shim reads it."""
        domain, bus, rest = self.pci.split(":")
        slot, function = rest.split(".")
        numbers = (int(number, 16) for number in (domain, bus, slot, function))
        return PLACE.pack(uuid_bytes(self.was), uuid_bytes(self.is_), *numbers, 0)


class GateStaysOpen(ShimError):
    """The gate could not be closed in time; it is open again and the job runs on."""

    id, exit_code = "gate", 18
    template = "process {pid} could not be held still within {seconds:g} s: {detail}"


class Shim:
    """A connection to one process; one client at a time has it.

    Whatever the process answers, nothing but a :class:`ShimError` comes of it, in time.

    Args:
        identity: the process.
        limit: seconds for an answer, all of it.
        patience: seconds until it has to have a socket.
        whole: seconds for everything that is asked, where somebody only looks: less where other processes of the same
            user have had him wait already.

    Attributes:
        owner: whose process it is: his vault and his mover serve it.
        until: a moment at which all is over that is asked, besides the limit of each question.
        refused: as :meth:`counts` was answered, whether it has kept another's checkpoint from being its end.

    Raises:
        NoSuchProcess, ShimError: it has ended; it does not run under the shim, or is somebody else's.
    """

    until: Deadline | None = None
    _interrupted = False

    def __init__(
        self,
        identity: Identity,
        limit: float | None = None,
        patience: float | None = None,
        whole: float | None = None,
    ):
        self.identity, self._number, self._lost, self.refused = identity, 0, False, False
        self.limit = ANSWER_SECONDS if limit is None else limit
        self._user, self._within, self._gpus_known = -1, None, answers.MOST_GPUS
        self._version = VERSION
        self._pids = None if is_ours(identity.pid, "pid") else Pids(identity.pid)
        if whole is not None:
            try:
                self._user = uids_of(identity.pid)[0]
            except OSError:
                raise NoSuchProcess(pid=identity.pid) from None
            self._within = Deadline(_patience.left(self._user, whole))
        self._connect(CONNECT_SECONDS if patience is None else patience)

    @classmethod
    def to_look(cls, identity: Identity, limit: float | None = None, patience: float | None = None) -> Shim:
        """Connect before anything is done to a process, for so many seconds in all.

        One that has not answered is not waited for as long again: a verb looks several times before it begins.
        """
        if identity in _silent:
            limit, patience = min(limit or AGAIN_SECONDS, AGAIN_SECONDS), 0.0
        limit = ANSWER_SECONDS if limit is None else limit
        return cls(identity, limit, patience, limit)

    def _connect(self, patience: float) -> None:
        identity, begun = self.identity, time.monotonic()
        deadline = self._deadline()
        try:
            while True:
                try:
                    return self._connect_once(deadline)
                except OSError as error:
                    if not identity.alive():
                        raise NoSuchProcess(pid=identity.pid) from None
                    # Another client, or one that has just come up, may keep us waiting; no shim's is no shim's.
                    preloaded = under_shim(identity.pid)
                    if not preloaded or time.monotonic() > begun + patience:
                        if preloaded:
                            _silent.add(identity)
                        raise self._error("connect", error) from error
                time.sleep(0.02)
        finally:
            self._has_waited(begun)

    def _connect_once(self, deadline: Deadline) -> None:
        why: OSError = ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        for name in names_of(self.identity.pid):
            try:
                self._socket = connect(self.identity.pid, name.address, deadline.left())
            except OSError as error:
                why = error
                continue
            try:
                self.identity.check()
                self.owner, self._version = self._is_itself(), name.version
                return
            except OSError as error:
                hang_up(self._socket)
                why = error
            except BaseException:
                hang_up(self._socket)
                raise
        raise why

    def _is_itself(self) -> int:
        """Whose the process at the other end is, if it is this one."""
        pid, uid = peer(self._socket)
        users = uids_of(pid)
        if pid != self.identity.pid or uid not in {0, *users}:
            raise PermissionError(errno.EACCES, f"process {pid} of user {uid} has its name")
        return uid if uid in users else users[0]  # what root brought back from an image listens as root

    def is_kept(self) -> None:
        """It is not only looked at from here on: each question has its own limit, and no more."""
        self._within, self._user = None, -1

    def hello(self) -> Hello:
        """Return where it stands."""
        return self._understood(Verb.HELLO, answers.hello, self._ask(Verb.HELLO))

    def memories(self) -> list[Memory]:
        """Return all that the shim looks after, by id."""
        found = self._all(Verb.LIST, MOST_PIECES, answers.memories)
        twice = len({m.id for m in found}) != len(found)
        strange = any(m.device >= self._gpus_known for m in found)
        if twice or strange or sum(m.bytes for m in found) > MOST_BYTES:
            raise self._wrong(Verb.LIST, Wrong("pieces of memory that there cannot be"))
        here = self._here({m.owner for m in found if m.owner > 0})
        return [msgspec.structs.replace(m, owner=here.get(m.owner, 0)) if m.owner > 0 else m for m in found]

    def _here(self, pids: Collection[int]) -> dict[int, int]:
        """What processes are called here that the shim tells of: it has the pids of its own namespace."""
        return {pid: pid for pid in pids} if self._pids is None else self._pids.all_here(pids)

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
        with Given() as found:
            deadline = self._for_all(self.limit, len(ids))
            for start in range(0, len(ids), MOST):
                some = ids[start : start + MOST]
                self._send(verb, deadline, ids=some)
                found.add(self._receive(verb, deadline, len(some))[2])
                if len(found) != start + len(some):
                    raise self._error(verb.name.lower(), f"{len(found) - start} descriptors came for {len(some)}")
            return found.take()

    def close_gate(self, seconds: float) -> None:
        """Hold the process still: no call is in the driver, all work is done.

        Raises GateStaysOpen: not within that time; it is open again.
        """
        self._until_still(Verb.CLOSE, seconds)

    def _until_still(self, verb: Verb, seconds: float) -> None:
        try:
            self._ask(verb, int(seconds * 1000), limit=seconds + self.limit)
        except ShimError as error:
            result = error.fields.get("result")
            if result in (NOT_READY, CAPTURING):
                why = "it is capturing a CUDA graph" if result == CAPTURING else "work on the GPU, or a call, goes on"
                raise GateStaysOpen(
                    pid=self.identity.pid, seconds=round(seconds, 1), what=verb.name.lower(), detail=why, result=result,
                    hint="try again: what it has begun has to come to an end meanwhile",
                ) from None  # fmt: skip
            raise

    def open_gate(self) -> None:
        """Let it go on; all memory must be there."""
        self._ask(Verb.OPEN)

    def unmap(self) -> Stand:
        """Take all that can be parked out of its address space and let it go: who has descriptors has the contents."""
        return self._stand(Verb.UNMAP, self._ask(Verb.UNMAP, limit=WORK_SECONDS))

    def map(self, ids: Sequence[int], fds: Sequence[int] = ()) -> Stand:
        """Give it memory back: imported and mapped where it was. The descriptors stay the caller's.

        Pieces that have not left (an unmap that failed in the middle), or were made anew by :meth:`make`, are told
        without descriptors.
        """
        stand, deadline = Stand.AWAY, self._for_all(WORK_SECONDS, len(ids))
        for start in range(0, len(ids), MOST):
            self._send(Verb.MAP, deadline, ids=ids[start : start + MOST], fds=fds[start : start + MOST])
            stand = self._stand(Verb.MAP, self._receive(Verb.MAP, deadline)[0])
        return stand

    def _for_all(self, seconds: float, n: int) -> Deadline:
        """One limit for so many pieces, in however many packets: what a process says takes no longer for being many."""
        return self._deadline(seconds + min(WORK_SECONDS, n * PIECE_SECONDS))

    def _stand(self, verb: Verb, said: Message) -> Stand:
        return self._understood(verb, answers.stand, said.a)

    def stack(self, bytes_: int) -> None:
        """Lower the stack limit of its contexts for the checkpoint; 0: back to what it was."""
        self._ask(Verb.STACK, bytes_)

    def bulk(self, bytes_: int) -> int:
        """Have memory ready for what the driver saves itself (0: none); returns what it asked for the last time."""
        limit = WORK_SECONDS + bytes_ / SLOWEST_TOUCH if bytes_ else None
        return min(self._ask(Verb.BULK, bytes_, limit=limit).c, MOST_BYTES)

    def keep(self, fds: Sequence[int] = ()) -> None:
        """Have the process itself hold descriptors while its memory is away; none: let go of those.

        What it held before it lets go of when it has all of the new ones.
        """
        deadline = self._for_all(self.limit, len(fds))
        for start in range(0, max(1, len(fds)), MOST):
            self._send(Verb.KEEP, deadline, a=start, b=len(fds), fds=fds[start : start + MOST])
            self._receive(Verb.KEEP, deadline)

    def kept(self) -> list[int]:
        """Return those descriptors, all of them or none, which are the caller's to close.

        Raises ShimError: not all of them came.
        """
        deadline = self._deadline()
        total = -1
        with Given() as found:
            while len(found) != total:
                self._send(Verb.KEPT, deadline, a=len(found))
                said, _, given = self._receive(Verb.KEPT, deadline, MOST)
                n = len(given)
                found.add(given)
                total = said.a if total < 0 else total
                if said.a != total or total > KEPT_MOST or n != min(MOST, total - len(found) + n):
                    raise self._wrong(Verb.KEPT, Wrong(f"{len(found)} descriptors came of {said.a}"))
            return found.take()

    def devices(self) -> list[str]:
        """Return the UUIDs of its GPUs, by its own numbers, as they are now."""
        found = self._gpus(0)[0]
        self._gpus_known = len(found)
        return found

    def sees(self, uuid: str) -> bool:
        """Return whether it saw a GPU when it initialised the driver: of others it cannot import memory."""
        return uuid in self.saw()

    def saw(self) -> list[str]:
        """Return the UUIDs of the GPUs that it saw when it initialised the driver, which is not asked for it."""
        return self._gpus(1)[1]

    def _gpus(self, first: int) -> tuple[list[str], list[str]]:
        said, data = self._one(Verb.DEVICES, first)
        return self._understood(Verb.DEVICES, answers.gpus, said, data)

    def places(self, operation: int, places: Sequence[Place]) -> None:
        """Say where its GPUs are, once a restore has changed them: it answers so where the driver does not.

        ``operation``: a number of it; what is said again within the same one takes the place of what was said before.
        """
        data = b"".join(place.packed() for place in places[:PLACES_MOST])
        deadline = self._deadline()
        self._send(Verb.PLACES, deadline, a=operation, data=data)
        self._receive(Verb.PLACES, deadline)

    def counts(self) -> dict[str, tuple[int, int]]:
        """Return what is left to the driver now: kind → pieces, bytes (``native/shim/count.h`` has the kinds)."""
        said, data = self._one(Verb.COUNTS)
        self.refused = said.b != 0
        return self._understood(Verb.COUNTS, answers.counts, data)

    def called(self) -> list[Called]:
        """Return every function of the driver that was called or asked for, by name."""
        return sorted(self._all(Verb.CALLED, MOST_CALLED, answers.names), key=lambda one: one.name)

    def sharers(self) -> dict[int, set[int]]:
        """Return whom its memory was given by legacy IPC handles: share → pids; some may have closed it since."""
        found: dict[int, set[int]] = {}
        pairs = self._all(Verb.SHARERS, MOST_SHARERS, answers.pairs)
        here = self._here({pid for _, pid in pairs})
        for share, pid in pairs:
            found.setdefault(share, set()).add(here.get(pid, 0))
        return {share: pids - {0} for share, pids in found.items()}

    # -- communicators of NCCL's -----------------------------------------------------------------------------------

    def comms(self) -> tuple[CommsLook, list[Comm]]:
        """Return how the gate before NCCL stands, and all communicators that have not ended."""
        return self._comms(0, answers.comms)

    def counted(self) -> tuple[CommsLook, list[Counted]]:
        """Return the sends and receives of all communicators."""
        return self._comms(1, answers.counted)

    def wants(self) -> tuple[CommsLook, list[Want]]:
        """Return what threads that wait before NCCL want to get to."""
        return self._comms(2, answers.wants)

    def _comms(self, what: int, each: Callable[[bytes, int], Iterable[_T]]) -> tuple[CommsLook, list[_T]]:
        looks: list[CommsLook] = []
        most = MOST_PAIRS if what else MOST_COMMS
        found = self._all(Verb.COMMS, most, each, what, lambda said: looks.append(answers.comms_look(said)))
        return looks[0], found

    def cut(self) -> None:
        """From here on calls of NCCL's that were not begun yet wait, but for those that :meth:`limits` lets through."""
        self._ask(Verb.CUT)

    def limits(self, limits: Sequence[tuple[tuple[int, int], Kind, int, int, int]]) -> None:
        """Let calls through: communicator, kind, which rank of the process's (-1: all), peer, and up to which count."""
        for start in range(0, len(limits), MOST_JOINS):
            some = limits[start : start + MOST_JOINS]
            data = b"".join(LIMIT.pack(*id_, most, kind, rank + 1, peer) for id_, kind, rank, peer, most in some)
            self._tell(Verb.LIMITS, data)

    def rest(self, seconds: float) -> None:
        """After :meth:`cut`: no call of NCCL's passes any more, and all work is done.

        Raises GateStaysOpen: not within that time.
        """
        self._until_still(Verb.REST, seconds)

    def shut(self, numbers: Sequence[int], seconds: float) -> None:
        """Close communicators, all ranks of which are at rest: one reads what lies in another one's memory."""
        for start in range(0, max(1, len(numbers)), MOST):
            some = numbers[start : start + MOST]
            data = struct.pack(f"={len(some)}Q", *some)
            self._tell(Verb.SHUT, data, int(seconds * 1000), seconds + self.limit)

    def unique_ids(self, numbers: Sequence[int]) -> list[bytes]:
        """Return ids to make communicators again with, of which this process is rank 0, by number.

        Where that was tried and has not come to an end they are the same: another rank may wait for the others.
        """
        found: list[bytes] = []
        for start in range(0, len(numbers), MOST):
            some = numbers[start : start + MOST]
            deadline = self._deadline()
            self._send(Verb.IDS, deadline, ids=some)
            said, data, _ = self._receive(Verb.IDS, deadline)
            if said.a != len(some) or len(data) != len(some) * UNIQUE_ID:
                raise self._wrong(Verb.IDS, Wrong(f"{len(data)} bytes for {len(some)} ids"))
            found += [data[at : at + UNIQUE_ID] for at in range(0, len(data), UNIQUE_ID)]
        return found

    def join(self, ids: Sequence[tuple[int, bytes]], seconds: float) -> None:
        """Make communicators again, by number, in this order; their other ranks do so at the same time."""
        for start in range(0, len(ids), MOST_JOINS):
            data = b"".join(JOIN.pack(*one) for one in ids[start : start + MOST_JOINS])
            self._tell(Verb.JOIN, data, int(seconds * 1000), seconds + self.limit)

    def let(self) -> None:
        """Let all calls of NCCL's through again."""
        self._ask(Verb.LET)

    def _tell(self, verb: Verb, data: bytes, a: int = 0, limit: float | None = None) -> None:
        deadline = self._deadline(limit)
        self._send(verb, deadline, a=a, data=data)
        self._receive(verb, deadline)

    def close(self) -> None:
        """Let another client have it."""
        hang_up(self._socket)

    def interrupt(self) -> None:
        """Have another thread that waits for an answer stop waiting, and ask nothing more until :meth:`leave`."""
        self._interrupted = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def leave(self) -> None:
        """The same, until it is asked again: then it is connected to anew."""
        self.close()
        self._lost, self._interrupted = True, False

    def __enter__(self) -> Shim:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- what is sent and received ---------------------------------------------------------------------------------

    def _deadline(self, seconds: float | None = None) -> Deadline:
        return Deadline(self.limit if seconds is None else seconds, self.until or self._within)

    def _has_waited(self, since: float) -> None:
        if self._within is not None:
            _patience.waited(self._user, time.monotonic() - since)

    def _ask(self, verb: Verb, a: int = 0, limit: float | None = None) -> Message:
        """One question, and an answer with nothing behind it."""
        said, data = self._one(verb, a, limit)
        self._understood(verb, answers.exactly, data, 0)
        return said

    def _one(self, verb: Verb, a: int = 0, limit: float | None = None) -> tuple[Message, bytes]:
        deadline = self._deadline(limit)
        self._send(verb, deadline, a=a)
        return self._receive(verb, deadline)[:2]

    def _all(
        self,
        verb: Verb,
        most: int,
        each: Callable[[bytes, int], Iterable[_T]],
        a: int = 0,
        also: Callable[[Message], object] = lambda _: None,
    ) -> list[_T]:
        """An answer of several packets: it says at once how many there are, and each brings some."""
        deadline, found, total = self._deadline(), list[_T](), -1
        self._send(verb, deadline, a=a)
        while len(found) != total:
            said, data, _ = self._receive(verb, deadline)
            self._understood(verb, also, said)
            first, total = total < 0, said.a if total < 0 else total
            if said.a != total or total > most or said.b > total - len(found) or not (said.b or (first and not total)):
                raise self._wrong(verb, Wrong(f"{said.b} more after {len(found)} of {total}"))
            found += self._understood(verb, lambda *args: list(each(*args)), data, said.b)
        return found

    def _send(
        self,
        verb: Verb,
        deadline: Deadline,
        *,
        a: int = 0,
        b: int = 0,
        ids: Sequence[int] = (),
        data: bytes = b"",
        fds: Sequence[int] = (),
    ) -> None:
        if self._interrupted:
            raise self._error(verb.name.lower(), "it was broken off")
        if self._lost:  # an answer that was not waited for any more would be taken for this one's
            hang_up(self._socket)
            self._connect(CONNECT_SECONDS)
            self._lost = False
        self._number += 1
        parts = [
            MESSAGE.pack(MAGIC, self._version, verb, self._number, 0, a, b, 0, 0),
            data or struct.pack(f"={len(ids)}Q", *ids),
        ]
        try:
            self._socket.settimeout(deadline.left())
            send(self._socket, parts, fds)
        except OSError as error:
            self._lost = True
            raise self._error(verb.name.lower(), error) from error

    def _receive(self, verb: Verb, deadline: Deadline, fds: int = 0) -> tuple[Message, bytes, Given]:
        """One packet, with so many descriptors at most."""
        begun = time.monotonic()
        try:
            packet, given = receive(self._socket, _PACKET, fds, deadline, memory=True)
        except (OSError, EOFError, Wrong) as error:
            self._lost = True
            if isinstance(error, TimeoutError):
                _silent.add(self.identity)
            if isinstance(error, Wrong):
                raise self._wrong(verb, error) from error
            raise self._error(verb.name.lower(), "it has gone" if isinstance(error, EOFError) else error) from error
        finally:
            self._has_waited(begun)
        with given:
            said, data = self._understood(verb, answers.message, packet)
            if said.magic == MAGIC and said.version != self._version:
                raise self._wrong(verb, "it was started by another version of Limosa")
            if (said.magic, said.verb, said.number) != (MAGIC, verb, self._number):
                raise self._wrong(verb, Wrong("the answer to something else"))
            if said.result:
                text = os.strerror(-said.result) if said.result < 0 else _result(verb, said.result)
                if verb is Verb.MAP and said.result > 0 and said.d & 255:
                    text += f" ({MAP_STEPS.get(said.d & 255, '?')}, device {said.d >> 16})"
                raise self._error(_OF_NCCL.get(verb, verb.name.lower()), text, said.result)
            _silent.discard(self.identity)
            return said, data, Given(given.take())

    def _understood(self, verb: Verb, decode: Callable[..., _T], *args: object) -> _T:
        try:
            return decode(*args)
        except Wrong as error:
            raise self._wrong(verb, error) from error

    def _wrong(self, verb: Verb, why: object) -> ShimError:
        """What is said of an answer that is none; what else may come on this connection is not believed."""
        self._lost = True
        return self._error(verb.name.lower(), f"it says what no shim says ({why})" if isinstance(why, Wrong) else why)

    def _error(self, what: str, detail: object, result: int = 0) -> ShimError:
        text = detail.strerror if isinstance(detail, OSError) and detail.strerror else str(detail)
        return ShimError(pid=self.identity.pid, what=what, detail=text, result=result)
