"""The jobs that ``gpu.py`` measures: started by ``limosa run``, told how much to hold, timed by their own clock."""

from __future__ import annotations

import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

VICTIM = Path(__file__).with_name(os.environ.get("LIMOSA_BENCH_VICTIM", "victim.py"))
"""The program; on software GPUs, which run no PyTorch, it is ``plain_victim.py``."""


def end_helpers(runtime: str) -> None:
    """Ends vault, mover and workers of a runtime folder, which would live on for some minutes."""
    mark = b"LIMOSA_RUNTIME_DIR=" + runtime.encode()
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            comm = Path(f"/proc/{name}/comm").read_text().strip()
            if (
                comm in ("limosa-vault", "limosa-mover", "limosa-worker")
                and mark in Path(f"/proc/{name}/environ").read_bytes()
            ):
                os.kill(int(name), signal.SIGKILL)
        except OSError:
            continue


class Job:
    """One ``victim.py``; it has its context as soon as it is :meth:`up` and waits for orders.

    Args:
        name: for its folder.
        base: where that is made.
        run: options of ``limosa run`` (``--no-shim``).
        env: for the job, beside ours.
        arguments: of ``victim.py``.
    """

    def __init__(
        self,
        name: str,
        base: Path,
        run: Sequence[str] = (),
        env: dict[str, str] | None = None,
        arguments: Sequence[str] = (),
    ):
        self.name, self.folder, self.orders = name, base / name, 0
        self.folder.mkdir(parents=True)
        self.log = self.folder / "log"
        argv = [sys.executable, "-m", "limosa", "run", *run, "--detach", "--log", str(self.log), "--name", name]
        argv += ["-o", "json", "--", sys.executable, str(VICTIM), str(self.folder), *arguments]
        done = subprocess.run(
            argv, capture_output=True, text=True, env={**os.environ, **(env or {})}, cwd=self.folder, timeout=60,
            check=False,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"limosa run: {done.stdout}{done.stderr}")
        self.pid: int = json.loads(done.stdout)["pid"]
        self.parts = [self.folder, *([self.folder / "second"] if "--pair" in arguments else [])]

    # -- telling -------------------------------------------------------------------------------------------------

    def up(self, limit: float = 90) -> None:
        """Waits until it has its context (both of a pair)."""
        self.until(lambda: self.text().count("READY") >= len(self.parts), limit, "READY")

    def hold(self, changing: float, still: float = 0.0, limit: float = 60) -> None:
        """Has it check what it held, then hold that many GB and compute."""
        self.orders += 1
        self._tell(f"{changing} {still}")
        self.until(lambda: self.text().count(f"HELD {self.orders}\n") >= len(self.parts), limit, "HELD")
        self.goes_on(20)

    def rest(self, limit: float = 60) -> None:
        """Has it check what it held, let go of it and compute nothing until it is to hold something again."""
        self.orders += 1
        self._tell("rest")
        self.until(lambda: self.text().count(f"RESTS {self.orders}\n") >= len(self.parts), limit, "RESTS")

    def finish(self, limit: float = 60) -> None:
        """Has it check everything and end; a page that is wrong fails here."""
        self.orders += 1
        self._tell("stop")
        end = time.monotonic() + limit
        while self.alive():
            if time.monotonic() > end:
                raise RuntimeError(f"{self.name} does not end:\n{self.text()[-2000:]}")
            time.sleep(0.01)
        if self.text().count("DONE") < len(self.parts):
            raise RuntimeError(f"{self.name} ended badly:\n{self.text()[-2000:]}")

    def kill(self) -> None:
        """Ends it, whatever it does."""
        for how in (os.killpg, os.kill):
            try:
                how(self.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass

    def _tell(self, words: str) -> None:
        for part in self.parts:
            (part / "order.new").write_text(f"{self.orders} {words}")
            os.replace(part / "order.new", part / "order")

    # -- looking -------------------------------------------------------------------------------------------------

    def alive(self) -> bool:
        """Whether it runs (zombies do not)."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
        except OSError:
            return False

    def text(self) -> str:
        """What it has said."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def until(self, true: Callable[[], bool], limit: float, what: str) -> None:
        """Waits; an error where it ends or takes too long."""
        end = time.monotonic() + limit
        while not true():
            if not self.alive() or time.monotonic() > end:
                raise RuntimeError(f"{self.name} has ended, or there is no {what} in {limit} s:\n{self.text()[-2000:]}")
            time.sleep(0.005)

    def ticks(self, part: int = 0) -> list[float]:
        """When it made its steps (CLOCK_MONOTONIC)."""
        path = self.parts[part] / "ticks"
        return [float(line) for line in path.read_text().rpartition("\n")[0].split()] if path.exists() else []

    def count(self, part: int = 0) -> int:
        """How many bytes of ticks there are: cheap to ask."""
        path = self.parts[part] / "ticks"
        return path.stat().st_size if path.exists() else 0

    def goes_on(self, steps: int = 10, limit: float = 60) -> None:
        """Waits until it (both of a pair) has made some more steps."""
        before = [self.count(part) for part in range(len(self.parts))]
        self.until(lambda: all(self.count(p) > b + 12 * steps for p, b in enumerate(before)), limit, "further step")

    def gap(self, since: float, until: float = float("inf")) -> tuple[float, float]:
        """Seconds that it stood still after ``since`` by its own clock, less a usual step, and when that began."""
        worst = (0.0, since)
        for part in range(len(self.parts)):
            pairs = list(itertools.pairwise(self.ticks(part)))
            usual = statistics.median([b - a for a, b in pairs if b < since][-200:] or [0.0])
            found = max(((b - a - usual, a) for a, b in pairs if since < b and a < until), default=(0.0, since))
            worst = max(worst, found)
        return worst

    def rate(self, begin: float, end: float) -> float:
        """Steps a second in that time."""
        return len([at for at in self.ticks() if begin < at <= end]) / max(1e-9, end - begin)
