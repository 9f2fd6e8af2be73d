"""One test, one way: start, (checkpoint, restore) once or more, stop, and what the test itself says."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from support import Reaper, end_marked, has_ended

from limosa.errors import LimosaError
from limosa.process.criu.find import find
from limosa.process.criu.log import cause
from limosa.process.identity import Identity
from limosa.process.status import effective_capabilities
from limosa.process.tree import job_tree
from zdtm.report import Outcome, Result
from zdtm.suite import Test

LIMIT = 60  # seconds for one dump or restore
MARK = "LIMOSA_ZDTM"


class Failed(Exception):
    """A step failed."""

    def __init__(self, how: str, why: str):
        super().__init__(how, why)
        self.how, self.why = how, why


class Way:
    """How a job is written and brought back; ``scratch`` is a folder of root's own, for images."""

    name = "bare"

    def __init__(self, test: Test, scratch: Path):
        self.test, self.scratch = test, scratch
        self.generation = 0

    @property
    def image(self) -> Path:
        return self.scratch / f"image{self.generation}"

    def dump(self, pid: int) -> None:
        """Raises Failed with "refused"."""
        self.image.mkdir()
        lock = ["--network-lock", find().network_lock] if "--tcp-established" in self.test.options.dump else []
        self._criu("dump", "-t", str(pid), *lock, *self.test.options.dump, how="refused")

    def restore(self) -> None:
        """Raises Failed with "lost"."""
        self._criu("restore", "--restore-detached", *self.test.options.restore, how="lost")

    def _criu(self, verb: str, *options: str, how: str) -> None:
        log = f"{verb}.log"
        command = [*find().argv, verb, "-D", str(self.image), "-o", log, "-v4", "--manage-cgroups=ignore", *options]
        done = _run(command)
        if done.returncode:
            text = (self.image / log).read_text(errors="replace") if (self.image / log).exists() else done.stdout
            raise Failed(how, cause(text, done.returncode).text)


class ByLimosa(Way):
    """By the command line."""

    name = "limosa"

    def dump(self, pid: int) -> None:
        self._limosa("checkpoint", str(pid), "--output", str(self.image), *self.test.options.limosa_dump, how="refused")

    def restore(self) -> None:
        self._limosa("restore", str(self.image), *self.test.options.limosa_restore, how="lost")

    def _limosa(self, *command: str, how: str) -> None:
        done = _run([sys.executable, "-m", "limosa", *command, "-o", "json"])
        if done.returncode:
            with contextlib.suppress(ValueError, KeyError):
                error = json.loads(done.stdout)["error"]
                raise Failed(how, f"{done.returncode} {error['id']}: {error['message']}")
            raise Failed(how, f"{done.returncode} {done.stdout[-300:]}")


WAYS = {way.name: way for way in (Way, ByLimosa)}


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, cwd="/", stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT, check=False,
            errors="replace",
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, f"it has not ended after {LIMIT} s", "")


def play(zdtm: Path, test: Test, way: str, scratch: Path, generations: int = 1) -> Outcome:
    """Runs one test one way; nothing of it is left afterwards."""
    place = scratch / f"{test.kind}-{test.name}-{way}"
    place.mkdir(mode=0o700)
    mark = f"{MARK}={test.kind}-{test.name}-{way}"
    one = _One(zdtm, test, WAYS[way](test, place), mark)
    reaper = Reaper()
    try:
        return one.run(generations)
    finally:
        end_marked(mark)
        reaper.close()
        one.hook("--clean")
        _unmount(zdtm)
        one.make("cleanout")
        shutil.rmtree(place, ignore_errors=True)


def _unmount(zdtm: Path) -> None:
    """What a test has mounted in its folder stays when it has ended."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        if line.split()[4].startswith(f"{zdtm}/"):
            subprocess.run(["umount", "-l", line.split()[4]], timeout=60, check=False)


def both(zdtm: Path, test: Test, scratch: Path, generations: int) -> Result:
    """Runs one test by bare CRIU and by Limosa."""
    bare, limosa = (play(zdtm, test, way, scratch, generations) for way in ("bare", "limosa"))
    return Result(test.label, generations, bare, limosa)


class _One:
    def __init__(self, zdtm: Path, test: Test, way: Way, mark: str):
        self.zdtm, self.test, self.way = zdtm, test, way
        self.base = zdtm / test.kind / test.name
        name, _, value = mark.partition("=")
        self.environment = {**os.environ, "TMPDIR": "/tmp", name: value, "ZDTM_IMG_DIR": str(way.scratch)}
        if "suid" not in test.flags and may_read_limits():
            self.environment |= {"ZDTM_UID": "18943", "ZDTM_GID": "58467", "ZDTM_GROUPS": "27495 48244"}
            self.base.parent.chmod(0o777)

    def run(self, generations: int) -> Outcome:
        took = {"dump": 0.0, "restore": 0.0}
        try:
            pid = self.start()
            if self.test.kind == "transition":
                time.sleep(0.3)  # into the middle of what it does
            self.environment["ZDTM_TEST_PID"] = str(pid)
            for _ in range(generations):
                self.way.generation += 1
                self.hook("--pre-dump")
                tree = self.tree(pid)
                with timed(took, "dump"):
                    self.dump(pid)
                self.gone([i.pid for i in tree])
                self.hook("--pre-restore")
                with timed(took, "restore"):
                    self.way.restore()
                self.environment["ZDTM_IMG_DIR"] = str(self.way.image)
                self.hook("--post-restore")
            self.stop(pid)
        except Failed as failed:
            return Outcome(failed.how, failed.why, **took)
        return Outcome("pass", "", **took)

    def tree(self, pid: int) -> list[Identity]:
        try:
            return job_tree(Identity.of(pid))
        except LimosaError as error:
            raise Failed(
                "start" if self.way.generation == 1 else "wrong", f"it has ended by itself ({error})"
            ) from None

    def dump(self, pid: int) -> None:
        try:
            self.way.dump(pid)
        except Failed as failed:
            try:
                self.stop(pid)
            except Failed as after:
                raise Failed("broken", f"{failed.why}; afterwards: {after.why}") from None
            raise failed

    def start(self) -> int:
        self.make("cleanout")
        if not self.make("pid"):
            raise Failed("start", "it does not start here")
        self.hook("--post-start")
        try:
            return int(Path(f"{self.base}.pid").read_text())
        except (OSError, ValueError):
            raise Failed("start", "it does not start here") from None

    def stop(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        end = time.monotonic() + self.test.timeout
        while not has_ended(pid):
            if time.monotonic() > end:
                raise Failed("wrong", f"it has not ended {self.test.timeout} s after SIGTERM")
            time.sleep(0.01)
        try:
            text = Path(f"{self.base}.out").read_text(errors="replace")
        except OSError:
            raise Failed("wrong", "it has ended without a result") from None
        if "PASS" not in text.split():
            raise Failed("wrong", next((line for line in text.splitlines() if "FAIL" in line), "no PASS")[:200])

    def gone(self, pids: list[int]) -> None:
        """Waits until the pids of what was written and ended are free."""
        end = time.monotonic() + 60
        while any(os.path.exists(f"/proc/{pid}") for pid in pids):
            if time.monotonic() > end:
                raise Failed("lost", f"of its processes {pids} some are still there")
            time.sleep(0.005)

    def make(self, what: str) -> bool:
        command = ["make", "--no-print-directory", "-C", str(self.base.parent), f"{self.test.name}.{what}"]
        with open(self.way.scratch / "make.log", "ab") as log, contextlib.suppress(subprocess.TimeoutExpired):
            done = subprocess.run(
                command, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                timeout=self.test.timeout, check=False,
            )  # fmt: skip
            return done.returncode == 0
        return False

    def hook(self, step: str) -> None:
        file = f"{self.base}.hook"
        if not os.access(file, os.X_OK):
            return
        with open(self.way.scratch / "hook.log", "ab") as log, contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(
                [file, step], env=self.environment, cwd=self.zdtm.parent, stdin=subprocess.DEVNULL, stdout=log,
                stderr=log, timeout=self.test.timeout, check=False,
            )  # fmt: skip


@contextlib.contextmanager
def timed(took: dict[str, float], name: str) -> Iterator[None]:
    begin = time.monotonic()
    try:
        yield
    finally:
        took[name] += time.monotonic() - begin


@functools.cache
def may_read_limits() -> bool:
    """Whether a job of another user can be dumped (CAP_SYS_RESOURCE); where not, every test runs as root."""
    return bool(effective_capabilities() & 1 << 24)
