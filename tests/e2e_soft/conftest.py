"""Fixtures of the tests that run the command line on nodes of software GPUs, as people would.

``soft`` starts a node; ``Soft`` is the node with what these tests need of it: jobs, and ``limosa`` with its exit code.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import warm
from soft_command import name_of
from soft_job import JOB, Job
from soft_node import Answer, Node, several
from support import Reaper

from limosa_softgpu.state import opened


def journalled() -> list[str]:
    """The steps in the journals of what is under way: "lock begin", "lock done" …"""
    found = []
    for path in Path(os.environ["LIMOSA_RUNTIME_DIR"]).glob("*/journals/*.jsonl"):
        with contextlib.suppress(FileNotFoundError):
            lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
            found += [f"{line['step']} {line['phase']}" for line in lines if "step" in line]
    return found


class Soft(Node):
    """A node of software GPUs; one job's memory is a fraction of what a GPU has."""

    def __init__(self, place: Path, reaper: Reaper, forks: bool, **options: Any):
        self.place, self.reaper, self.n_jobs, self.forks = place, reaper, 0, forks
        self.words: dict[int, Path] = {}
        self.halted: dict[int, Path] = {}
        super().__init__(**{"gpus": 2, "memory": "256MiB", **options})

    def job(self, *arguments: object, ready: bool = True, env: dict[str, str] | None = None) -> Job:
        """Starts ``job.py``; waits until it computes. What CRIU is to dump has to have begun in the node."""
        folder = self.place / f"job{self.n_jobs}"
        self.n_jobs += 1
        words = [str(word) for word in arguments]
        if self.forks and (env or {}).keys() <= {"LD_PRELOAD"}:
            job = Job.forked(self, folder, words, env)
        else:  # what a program is told before it begins
            job = Job(self, folder, [sys.executable, str(JOB), str(folder), *words], env)
        self.reaper.watch(job.pid)
        if ready:
            job.wait_for("READY")
            if "--spin" not in arguments:
                job.goes_on(2)
        return job

    def says(self, code: int, id_: str, *arguments: object, **options: Any) -> dict[str, Any]:
        """Runs ``limosa … -o json``, which has to exit with that code and (unless "") that id; what it printed."""
        verb, *rest = arguments
        return self.judge(self.limosa(verb, "-o", "json", *rest, rc=None, **options), code, id_)

    def judge(self, answer: Answer, code: int, id_: str) -> dict[str, Any]:
        """Looks whether an answer has that exit code and (unless "") that id; what it printed as JSON."""
        assert answer.rc == code, f"exit code {answer.rc}, not {code}: {answer}"
        found: dict[str, Any] = answer.json if answer.stdout.startswith("{") else {}
        if id_:
            error = found.get("error") or next(r for r in found["reasons"] if r["exit_code"])
            assert error["id"] == id_, answer
        return found

    def state(self, job: Job) -> str:
        """What the driver says of a job, through ``limosa ps``."""
        found = [j for j in self.limosa("ps", "-o", "json").json["jobs"] if j["pid"] == job.pid]
        return found[0]["state"] if found else "none"

    def where(self, job: Job) -> list[int]:
        """On which GPUs a job holds memory: from the node's state, as NVML counts it."""
        found = set()
        with opened(self.folder) as state:
            for place in range(state.n_blocks):
                block = state.blocks[place]
                if block.id and block.pid == job.pid and self._held(block.id):
                    found.add(int(block.gpu))
            del block, state
        return sorted(found)

    def _held(self, block: int) -> bool:
        """Whether anybody still holds a block: then its file cannot be locked."""
        try:
            fd = os.open(f"{self.folder}/memory/{block}", os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        else:
            return False
        finally:
            os.close(fd)

    def limosa(self, *arguments: object, rc: int | None = 0, limit: float = 120, **options: Any) -> Answer:
        """Runs the command line in the node, from a warm process where that can be."""
        if not self._can_be_warm(arguments, options):
            return super().limosa(*arguments, rc=rc, limit=limit, **options)
        process = self.run_attached(*arguments, **options)
        try:
            answer = self.ends(process, limit)
        except subprocess.TimeoutExpired:
            process.kill()
            raise AssertionError(f"{arguments} did not end within {limit} s:\n{self.heard(process)}") from None
        assert rc is None or answer.rc == rc, answer
        return answer

    @staticmethod
    def _can_be_warm(arguments: Sequence[object], options: dict[str, Any]) -> bool:
        """Not what becomes a job, nor what is started in some way that a test is about."""
        return arguments[:1] != ("run",) and not options.keys() - {"env", "cwd"}

    def later(self, verb: object, *arguments: object, halts: str = "") -> Any:
        """Starts ``limosa VERB … -o json`` and does not wait for it.

        Where it halts (``reaches``) it stands still when it has journalled that step, until ``kill`` or ``go_on``.
        """
        return self.run_attached(verb, "-o", "json", *arguments, halts=halts)

    def run_attached(
        self, *arguments: object, env: dict[str, str] | None = None, cwd: Path | None = None, halts: str = ""
    ) -> Any:
        """Starts ``limosa …`` and does not wait for it: a ``Popen``, or what is needed of one."""
        words = self.place / f"stderr{len(self.words)}"
        there = self.place / f"halted{len(self.words)}"
        with open(words, "w") as file:
            if self._can_be_warm(arguments, {}):
                whole = self.environment(env)
                at = (halts, there) if halts else None
                process: Any = warm.limosa(
                    arguments, env=whole, cwd=cwd or self.place, node=self.pid, stderr=file, halts=at
                )
            else:
                streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": file, "text": True}
                argv = [sys.executable, "-m", "limosa", *arguments]
                process = self.popen(argv, cwd=cwd or self.place, env=env, **streams)
        self.words[process.pid] = words
        if halts:
            self.halted[process.pid] = there
        return process

    def reaches(self, process: Any, step: str, limit: float = 60) -> None:
        """Waits until what was started has journalled a step ("lock done"), and is still at it."""
        end = time.monotonic() + limit
        there = self.halted.get(process.pid)
        while not there.exists() if there else step not in journalled():
            noted = journalled()
            assert process.poll() is None, f"it has ended before {step}: {self.heard(process)}"
            assert time.monotonic() < end, f"no {step}, only {noted}"
            time.sleep(0.002)
        assert process.poll() is None, f"it has ended with {step}"

    def go_on(self, process: Any) -> None:
        """Lets one go on that has halted."""
        if there := self.halted.get(process.pid):
            there.unlink(missing_ok=True)

    def has(self, who: str) -> bool:
        """Whether there is a vault, or a mover, of that name."""
        return any(name_of(pid) == who for pid in self.processes())

    def kill(self, who: str, process: Any = None) -> None:
        """SIGKILL to a process of limosa's, or to each vault or mover; there has to be one."""
        victims = (
            [process.pid] if process and who == "limosa" else [pid for pid in self.processes() if name_of(pid) == who]
        )
        assert victims, f"no {who}"
        for pid in victims:
            with contextlib.suppress(ProcessLookupError):
                pidfd = os.pidfd_open(pid)
                os.kill(pid, signal.SIGKILL)
                select.select([pidfd], [], [], 20)  # until then its locks are held
                os.close(pidfd)
        if process:
            self.go_on(process)

    def heard(self, process: Any) -> str:
        """What a command that was not waited for has said on stderr so far."""
        return self.words[process.pid].read_text()

    def ends(self, process: Any, limit: float = 120) -> Answer:
        """Waits for what ``later`` has started."""
        begin = time.monotonic()
        stdout, _ = process.communicate(timeout=limit)
        words = list(map(str, process.args))
        return Answer(words, process.returncode, stdout, self.heard(process), time.monotonic() - begin)


@pytest.fixture
def soft(
    tmp_path: Path, runtime: Path, reaper: Reaper, request: pytest.FixtureRequest
) -> Iterator[Callable[..., Soft]]:
    """Starts nodes: ``soft()``, ``soft(chip=["H200", "H100"])``; ended at the end of the test."""
    forks = request.node.get_closest_marker("criu") is None
    with several(functools.partial(Soft, tmp_path, reaper, forks)) as start:
        yield start


@pytest.fixture
def node(soft: Callable[..., Soft]) -> Soft:
    """A node of two GPUs of one kind."""
    return soft()


@pytest.fixture
def parked(soft: Callable[..., Soft], monkeypatch: pytest.MonkeyPatch) -> Soft:
    """A node for jobs under the shim; whoever holds their memory ends soon after the last of it."""
    monkeypatch.setenv("LIMOSA_VAULT_IDLE", "2")
    return soft(gpus=2, memory="512MiB")


@pytest.fixture
def slow(soft: Callable[..., Soft], monkeypatch: pytest.MonkeyPatch) -> Soft:
    """The same, where the driver's steps and copies take long enough to be met."""
    monkeypatch.setenv("LIMOSA_VAULT_IDLE", "2")
    costs = [f"{step}=0.1" for step in ("lock", "checkpoint", "restore", "unlock")]
    return soft(gpus=2, memory="512MiB", costs=costs, speeds=["copy=300MiB/s", "peer=300MiB/s"])
