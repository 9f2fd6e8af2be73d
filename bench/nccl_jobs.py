"""The jobs of several ranks that ``gpu.py`` measures: torchrun under ``limosa run``, timed by the ranks' own stamps."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from jobs import Job

VICTIMS = Path(__file__).resolve().parents[1] / "tests" / "gpu" / "victims" / "nccl"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


class Ranks(Job):
    """Ranks of a program in ``tests/gpu/victims/nccl`` (FOLDER among its arguments is the job's).

    Args:
        name: for its folder.
        base: where that is made.
        argv: the program and its arguments.
        run: options of ``limosa run`` (``--no-shim``).
        ranks: how many.
    """

    def __init__(self, name: str, base: Path, argv: Sequence[str], run: Sequence[str] = (), ranks: int = 2):
        self.name, self.folder, self.orders, self.ranks = name, base / name, 0, range(ranks)
        self.folder.mkdir(parents=True)
        self.log, self.parts = self.folder / "log", [self.folder for _ in self.ranks]
        words = [word.replace("FOLDER", str(self.folder)) for word in (str(VICTIMS / argv[0]), *argv[1:])]
        command = [sys.executable, "-m", "limosa", "run", *run, "--detach", "--log", str(self.log), "--name", name]
        command += ["-o", "json", "--", *TORCHRUN, f"--nproc-per-node={ranks}", *words]
        done = subprocess.run(command, capture_output=True, text=True, cwd=self.folder, timeout=60, check=False)
        if done.returncode:
            raise RuntimeError(f"limosa run: {done.stdout}{done.stderr}")
        self.pid = json.loads(done.stdout)["pid"]

    def trace(self, part: int) -> Path:
        """Where a rank writes its steps."""
        return self.folder / (f"trace-{part}" if part else "trace")

    def steps(self, part: int) -> list[tuple[float, str]]:
        """(its clock, result) of each step."""
        path = self.trace(part)
        text = path.read_text().rpartition("\n")[0] if path.exists() else ""
        return [(float(line.split()[1]), line.split()[2]) for line in text.splitlines()]

    def ticks(self, part: int = 0) -> list[float]:
        """When it made its steps (CLOCK_MONOTONIC)."""
        return [at for at, _ in self.steps(part)]

    def count(self, part: int = 0) -> int:
        """How many bytes of steps there are: cheap to ask."""
        path = self.trace(part)
        return path.stat().st_size if path.exists() else 0

    def up(self, limit: float = 150) -> None:
        """Waits until all ranks have made some steps."""
        self.until(lambda: all(self.count(part) > 1000 for part in self.ranks), limit, "steps")

    def goes_on(self, steps: int = 10, limit: float = 60) -> None:
        """Waits until all ranks have made some more steps, of 30 bytes or more each."""
        before = [self.count(part) for part in self.ranks]
        self.until(lambda: all(self.count(p) > b + 45 * steps for p, b in enumerate(before)), limit, "further step")

    def longest(self, since: float) -> tuple[float, float]:
        """The longest time between two stamps of any rank that ends after ``since``; a usual one of before."""
        worst, usual = 0.0, 0.0
        for part in self.ranks:
            pairs = list(itertools.pairwise(self.ticks(part)))
            worst = max([worst, *(b - a for a, b in pairs if b > since)])
            usual = max(usual, statistics.median([b - a for a, b in pairs if b < since][-200:] or [0.0]))
        return worst, usual

    def finish(self, limit: float = 60) -> None:
        """Has it end in a moment, and well: each rank compares what it holds with what it wrote."""
        if self.trace(0).exists():
            ticks = self.ticks()
            a_second = len([at for at in ticks if at > ticks[-1] - 1]) if ticks else 0
            (self.folder / "until.new").write_text(str(len(ticks) + 20 + 2 * a_second))
            os.replace(self.folder / "until.new", self.folder / "until")
        end = time.monotonic() + limit
        while self.alive():
            if time.monotonic() > end:
                raise RuntimeError(f"{self.name} does not end:\n{self.text()[-2000:]}")
            time.sleep(0.01)
        if self.text().count("DONE") < len(self.ranks):
            raise RuntimeError(f"{self.name} ended badly:\n{self.text()[-2000:]}")

    def family(self) -> list[int]:
        """It and its descendants: torchrun gives each rank a session of its own."""
        parents: dict[int, int] = {}
        for name in os.listdir("/proc"):
            if name.isdigit():
                with contextlib.suppress(OSError, IndexError):
                    parents[int(name)] = int(Path(f"/proc/{name}/stat").read_bytes().rpartition(b")")[2].split()[1])
        found = [self.pid]
        for pid in found:
            found += [child for child, parent in parents.items() if parent == pid]
        return found

    def kill(self) -> None:
        """Ends all of it, whatever it does."""
        for pid in self.family():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def reaped(pids: Sequence[int]) -> Iterator[None]:
    """Reaps these children as soon as they end: a restore waits for their pids, and some machines' init takes time."""
    over = threading.Event()

    def reap() -> None:
        while not over.wait(0.003):
            for pid in pids:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)

    thread = threading.Thread(target=reap, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class Asked(Ranks):
    """``asked.py``: makes steps when asked for, and says how long one took; as a side of ``cost.compare``."""

    def __init__(self, name: str, base: Path, kind: str, run: Sequence[str], more: Sequence[str] = ()):
        super().__init__(name, base, ["asked.py", "FOLDER", "--kind", kind, *more], run)

    def wait(self, limit: float = 150) -> None:
        """Until both ranks are ready."""
        self.until(lambda: self.text().count("READY") >= len(self.ranks), limit, "READY")

    def ask(self, steps: str, limit: float = 60) -> float:
        """Milliseconds a step, of so many."""
        self.orders += 1
        self._tell(steps)
        answer, found = self.folder / "answer", [0.0]

        def answered() -> bool:
            words = answer.read_text().split() if answer.exists() else []
            if words[:1] == [str(self.orders)]:
                found[0] = float(words[1])
            return bool(found[0])

        self.until(answered, limit, "answer")
        return found[0]

    def end(self) -> None:
        """It has done its work."""
        self.kill()
