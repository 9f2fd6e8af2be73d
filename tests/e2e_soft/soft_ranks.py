"""Jobs of several ranks that talk over NCCL: what they write, and whether it is what an undisturbed twin writes."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from soft_command import waits_for
from softgpu.nccl_agent import numbers
from support import end_session, has_ended

from limosa.errors import LimosaError
from limosa.parking.protocol import CommGate
from limosa.parking.shim import Shim
from limosa.process.identity import Identity

AGENT = Path(__file__).parents[1] / "softgpu" / "nccl_agent.py"
AHEAD, AHEAD_LARGE = 400, 60
"""Steps after those that were made: no rank is there when it hears that this is the last one. Large ones are slow."""
LARGE = 1 << 18
MANY = 1_000_000


class Ranks:
    """An agent and its ranks, started by ``limosa run`` or without anything.

    Attributes:
        pid: the agent's; a restored one has the same.
        pids: the ranks'.
    """

    def __init__(self, node: Any, *options: object, ranks: int = 2, under: bool = True, ready: bool = True):
        self.node, self.n = node, ranks
        self.options = [str(option) for option in options]
        if "--elements" not in self.options:
            self.options += ["--elements", "512"]
        self.folder = node.place / f"ranks{node.n_jobs}"
        node.n_jobs += 1
        self.folder.mkdir()
        until = ["--until", str(self.folder / "until"), *(() if "--pause" in self.options else ("--pause", "2"))]
        argv = self._argv(self.folder, MANY, until)
        if under:
            started = node.limosa("run", "-d", "--name", self.folder.name, "--", *argv, cwd=node.place)
            self.pid = int(started.stdout.split()[0])
        else:
            self.pid = node.popen(argv, start_new_session=True).pid
        node.reaper.watch(self.pid)
        if ready:
            self.goes_on(2)

    def _argv(self, folder: Path, steps: int, more: list[str]) -> list[str]:
        argv = [sys.executable, str(AGENT), str(folder), "--ranks", str(self.n), "--steps", str(steps)]
        return [*argv, *self.options, *more]

    @property
    def pids(self) -> list[int]:
        self.until((self.folder / "ranks").exists, "ranks")
        return [int(line) for line in (self.folder / "ranks").read_text().split()]

    def alive(self) -> bool:
        return not has_ended(self.pid)

    def files(self) -> list[Path]:
        """What each rank writes, and its second thread."""
        found = [self.folder / f"rank-{rank}" for rank in range(self.n)]
        return found + (
            [path.with_name(f"{path.name}.thread") for path in found] if "--threads" in self.options else []
        )

    def steps(self) -> list[int]:
        """How many steps each has made."""
        return [path.read_text().count("\n") if path.exists() else 0 for path in self.files()]

    def words(self) -> str:
        """What the ranks have said."""
        return "".join(f"{path.name}: {path.read_text()[-900:]}\n" for path in sorted(self.folder.glob("rank-*.out")))

    def until(self, true: Callable[[], bool], what: str, limit: float = 90) -> None:
        end = time.monotonic() + limit
        while not true():
            assert self.alive() or true(), f"it has ended, waiting for {what}: {self.verdict()} {self.words()}"
            assert time.monotonic() < end, f"no {what} within {limit} s, steps {self.steps()}: {self.words()}"
            time.sleep(0.005)

    def goes_on(self, steps: int = 5) -> None:
        """Waits until each rank has made some more steps."""
        before = self.steps()
        self.until(lambda: all(now >= was + steps for now, was in zip(self.steps(), before, strict=True)), "steps")

    def verdict(self) -> str:
        path = self.folder / "verdict"
        return path.read_text() if path.exists() else ""

    def stands(self, quiet: float = 1.0) -> None:
        """Waits until no rank has made a step for so long: one of them is held."""
        seen, since, end = self.steps(), time.monotonic(), time.monotonic() + 60
        while time.monotonic() < since + quiet:
            time.sleep(0.01)
            if (now := self.steps()) != seen:
                seen, since = now, time.monotonic()
            assert time.monotonic() < end, "the ranks go on"

    def is_to_end(self, last: int | None = None) -> int:
        """Has it end after that step, or one that no rank has begun; which one."""
        if last is None:
            large = int(self.options[self.options.index("--elements") + 1]) >= LARGE
            last = max(self.steps()) + (AHEAD_LARGE if large else AHEAD)
        new = self.folder / "until.new"
        new.write_text(str(last))
        new.rename(self.folder / "until")
        return last

    def finish(self) -> None:
        """Has it end, and compares what its ranks have computed with the twin's."""
        assert self.open() == [True] * self.n
        last = self.is_to_end()
        self.until(lambda: self.verdict() != "", "end", 120)
        assert self.verdict() == "right", f"{self.verdict()}: {self.words()}"
        assert self.steps() == [last] * len(self.files())
        self.is_as_its_twin()

    @property
    def twin(self) -> Path:
        """Where an undisturbed run writes to."""
        return Path(self.node.place / f"{self.folder.name}-twin")

    def is_as_its_twin(self) -> None:
        """Every step of every rank has the bits that an undisturbed run has."""
        twin = self.twin
        twin.mkdir()
        self.node.run(self._argv(twin, max(self.steps()), []), limit=300)
        for path in self.files():
            assert numbers(path) == numbers(twin / path.name)[: len(numbers(path))], path.name

    def open(self) -> list[bool]:
        """Whether the gate before NCCL of each rank is open, and nothing is closed; True of one without the shim."""
        found = []
        for pid in self.pids:
            try:
                with Shim(Identity.of(pid)) as shim:
                    look, comms = shim.comms()
                    found.append(look.gate is CommGate.OPEN and not any(comm.closed for comm in comms))
            except LimosaError:
                found.append(True)
        return found

    def gpus(self) -> list[list[int]]:
        """On which GPUs each rank has memory of its own."""
        on = self.node.limosa("gpus", "-o", "json").json["gpus"]
        return [[gpu["index"] for gpu in on if any(p["pid"] == pid for p in gpu["processes"])] for pid in self.pids]

    def kill(self) -> None:
        """Ends all of it."""
        end_session(self.pid)
        waits_for(self.node, lambda: not any(Path(f"/proc/{pid}/fd").exists() for pid in self.pids))


@contextlib.contextmanager
def signalled(pids: list[int], begin: int, end: int) -> Any:
    """These get a signal, and another one at the end."""
    for pid in pids:
        os.kill(pid, begin)
    try:
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, end)
