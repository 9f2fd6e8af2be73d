"""Victims as the room sees them: started, asked to prove their memory, ended for sure."""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import time
from pathlib import Path
from typing import Any

from support import end_session, pids, stat_of

from campaign.processes import REAL
from campaign.shapes import COMMANDS, SHAPES, Shape, Slot
from campaign.twin import Proof, expected

PATIENCE = 30.0 if REAL else 8.0
"""Seconds in which a victim has to have finished an epoch: on real GPUs a dozen are at it side by side."""
PASSING = ("/nvidia-soft/lock", "/nvidia-soft/state")
"""What a driver in software has open for a moment, again and again."""
PTX = Path(__file__).parents[2] / "src" / "limosa" / "demo" / "kernels.ptx"


class Lost(AssertionError):
    """A victim does not do what it has to."""


class UnderShim:
    """What shims say of a victim's processes, where it has them."""

    known: Shape
    cuda_pids: Any

    def alive(self) -> bool:
        """Whether it lives."""
        raise NotImplementedError

    def parked_memory(self) -> list[list[tuple[str, bool]]]:
        """Of each process under the shim, what it looks after: on which GPU (UUID) it is, and whether it is away."""
        from limosa.errors import LimosaError
        from limosa.parking.shim import Shim
        from limosa.process.identity import Identity

        found = []
        for pid in self.cuda_pids if self.known.shim and self.alive() else ():
            try:
                with Shim(Identity.of(pid)) as shim:
                    devices = shim.devices()
                    found.append([(devices[m.device], m.away) for m in shim.memories()])
            except LimosaError:
                continue
        return found

    def stands(self) -> set[str]:
        """How the shims of its processes stand: "open", "closed", "away"; none where it has none."""
        from limosa.errors import LimosaError
        from limosa.parking.shim import Shim
        from limosa.process.identity import Identity

        found = set()
        for pid in self.cuda_pids if self.known.shim and self.alive() else ():
            try:
                with Shim(Identity.of(pid)) as shim:
                    found.add(shim.hello().stand.name.lower())
            except LimosaError:
                continue
        return found


class Job(UnderShim):
    """One victim: all its processes."""

    def __init__(self, nursery: Any, shape: str, folder: Path, first: int):
        self.shape, self.folder, self.first = shape, folder, first
        folder.mkdir(parents=True)
        page = folder / "page"
        page.write_bytes(bytes(4096))
        with open(page, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 4096)
        self.known = SHAPES[shape]
        self.slots = len(self.known.processes) + self.known.idle
        order = {"shape": shape, "folder": str(folder), "ptx": str(PTX), "first": first}
        self.pid = int(nursery.ask(order, "victim")["victim"])
        self._requests = 0
        self.missing: set[int] = set()  # slots whose process was ended on purpose
        self.storeless = False  # its ranks have lost their store
        self.goes_on(limit=max(30.0, 2 * PATIENCE))
        self.size, self.open, self.ran = self.resident(), self.descriptors(), self.threads()

    @property
    def called(self) -> str:
        """What a command line takes for it."""
        return str(self.pid)

    def look(self) -> None:
        """It has the same pid wherever it is."""

    def get(self, slot: int, word: int) -> int:
        """A word of the control page."""
        return int(struct.unpack_from("<Q", self._memory, 8 * (slot * Slot.WORDS + word))[0])

    def set(self, slot: int, word: int, value: int) -> None:
        """Writes one."""
        struct.pack_into("<Q", self._memory, 8 * (slot * Slot.WORDS + word), value)

    @property
    def cuda_pids(self) -> list[int]:
        """The processes with CUDA state, by slot."""
        here = [slot for slot, parts in enumerate(self.known.processes) if parts and slot not in self.missing]
        return [self.get(slot, Slot.PID) for slot in here]

    @property
    def stoppable(self) -> int:
        """Which of its processes is stopped, where one is."""
        return self.cuda_pids[-1] if self.known.ranks else self.pid

    def lose_store(self) -> None:
        """The agent's store goes; where that is stopped, when it goes on."""
        self.storeless = True
        self.open = [one for one in self.open if not one.endswith(" socket")]
        self.set(0, Slot.COMMAND, COMMANDS["lose-store"])
        end = time.monotonic() + 0.1
        while self.get(0, Slot.DONE) != COMMANDS["lose-store"] and time.monotonic() < end:
            time.sleep(0.001)

    def alive(self) -> bool:
        """Whether its topmost process lives."""
        stat = stat_of(self.pid)
        return stat is not None and stat[2] not in "ZX"

    def session(self) -> list[int]:
        """Its living processes."""
        found = {pid: stat for pid in pids() if (stat := stat_of(pid)) is not None}
        return sorted(pid for pid, (_, sid, state) in found.items() if sid == self.pid and state not in "ZX")

    def epochs(self) -> list[int]:
        """Each process's epoch."""
        return [self.get(slot, Slot.EPOCH) for slot in range(self.slots) if slot not in self.missing]

    def goes_on(self, limit: float = PATIENCE) -> None:
        """Waits until each of its processes has finished another epoch.

        Raises:
            Lost: one does not.
        """
        before, end = self.epochs(), time.monotonic() + limit
        while any(now <= then for now, then in zip(self.epochs(), before, strict=True)):
            if not self.alive() or time.monotonic() > end:
                raise Lost(f"the job does not go on: epochs {before} → {self.epochs()}, {self.words()}")
            time.sleep(0.0005)

    def prove(self, limit: float = PATIENCE) -> None:
        """Has every process prove its memory, and compares with the twin.

        Raises:
            Lost: it does not answer, or its memory is not the twin's.
        """
        self._requests = max(self.get(slot, Slot.REQUEST) for slot in range(self.slots)) + 1
        asked = [slot for slot in range(len(self.known.processes)) if slot not in self.missing]
        for slot in asked:
            self.set(slot, Slot.REQUEST, self._requests)
        end = time.monotonic() + limit
        while any(self.get(slot, Slot.ANSWER) != self._requests for slot in asked):
            if not self.alive() or time.monotonic() > end:
                raise Lost(f"the job does not answer: {self.words()}")
            time.sleep(0.0005)
        for slot in asked:
            told = Proof(*(self.get(slot, word) for word in (Slot.ANSWER_EPOCH, Slot.HASH, Slot.BYTES, Slot.FLOATS)))
            twin = expected(self.shape, slot, told.epoch)
            if told != twin:
                raise Lost(f"memory of process {slot} is not its twin's: {told} instead of {twin}")

    def communicators(self) -> dict[int, str]:
        """How the gate of each of its ranks that answer stands: "open", "cut", "shut"; "closed" what is closed."""
        from limosa.errors import LimosaError
        from limosa.parking.shim import Shim
        from limosa.process.identity import Identity

        found = {}
        for pid in self.cuda_pids:
            with contextlib.suppress(LimosaError), Shim(Identity.of(pid)) as shim:
                look, comms = shim.comms()
                found[pid] = "closed" if any(comm.closed for comm in comms) else look.gate.name.lower()
        return found

    def words(self) -> str:
        """Its state and what it has said."""
        states = {pid: stat_of(pid) for pid in self.session()}
        log = (self.folder / "log").read_text(errors="replace") if (self.folder / "log").exists() else ""
        return f"processes {states}, log {log[-400:]!r}"

    def command(self, name: str, limit: float = 3.0) -> None:
        """Has it exit, or fork a child, or end that child."""
        self.set(0, Slot.DONE, 0)
        self.set(0, Slot.COMMAND, COMMANDS[name])
        end = time.monotonic() + limit
        while self.alive() and self.get(0, Slot.DONE) != COMMANDS[name] and time.monotonic() < end:
            time.sleep(0.002)
        self.set(0, Slot.COMMAND, 0)  # an image of it must not exit when it comes back

    def descriptors(self) -> list[str]:
        """What its processes hold open, to be the same before and after.

        On real GPUs each thing once: a driver has not as many of its own after a restore as before.
        """
        found = []
        for number, pid in enumerate(self.session()):
            for fd in os.listdir(f"/proc/{pid}/fd"):
                try:
                    target = os.readlink(f"/proc/{pid}/fd/{fd}")
                except OSError:
                    continue
                kind = target.split(":")[0] if ":" in target else target
                if kind.endswith(PASSING) or (self.storeless and kind == "socket"):
                    continue
                if kind.startswith("/dev/shm/nccl-"):
                    kind = "/dev/shm/nccl"  # each has a name of its own
                if "/nvidia-soft/memory" in kind:
                    kind = "device memory"
                if self.known.hidden and kind.startswith("/dev/nvidia"):
                    kind = kind.rstrip("0123456789")  # it has open what it sees
                found.append(f"{number} {kind}")
        return sorted(set(found) if REAL else found)

    def threads(self) -> int:
        """How many threads its processes have, without those that NCCL has for a call that does not block."""
        found = []
        for _ in range(21 if self.known.ranks and self.known.ranks.nonblocking else 1):
            time.sleep(0.002 if found else 0)
            found.append(sum(len(os.listdir(f"/proc/{pid}/task")) for pid in self.session()))
        return min(found)

    def resident(self) -> int:
        """Bytes of anonymous memory of all its processes."""
        total = 0
        for pid in self.session():
            with open(f"/proc/{pid}/status") as file:
                total += sum(int(line.split()[1]) << 10 for line in file if line.startswith("RssAnon"))
        return total

    def kill(self) -> None:
        """Ends it."""
        end_session(self.pid)

    def end(self) -> None:
        """Ends it; nothing of it is left."""
        end_session(self.pid)
