"""One run of the demo's job: starting it, following its steps, reading its losses (or hashes), ending it."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from limosa import gpu, job, start
from limosa.errors import LimosaError, UsageError
from limosa.process.identity import Identity, Stat, read_stat
from limosa.process.launch import launch
from limosa.process.tree import descendants, snapshot

PROGRAMS = {"torch": "train.py", "numpy": "train.py", "cuda": "compute.py"}
_START_SECONDS = 180.0  # importing PyTorch from a cold network disk takes a minute and more
_STEP_SECONDS = 60.0


class Stack(msgspec.Struct, frozen=True):
    """What the training is run with.

    Attributes:
        python: the interpreter.
        framework: "torch", "numpy", or "cuda" for the program that computes on device memory without either.
        device: "cuda" or "cpu".
        why: why not the better one, or "".
    """

    python: str
    framework: str
    device: str = "cpu"
    why: str = ""


def find_stack(gpus: int, only_numpy: bool = False, *, software: bool = False) -> Stack:
    """Looks for PyTorch in this Python and in those on PATH (it need not be in Limosa's own environment), else NumPy.

    Args:
        gpus: how many GPUs there are; with some, a PyTorch that can use them is preferred, then what needs none.
        only_numpy: do not look for PyTorch.
        software: the GPUs are software ones, which run the kernels of ``compute`` and no others.

    Raises:
        UsageError: there is neither.
    """
    if software and not only_numpy:
        return Stack(sys.executable, "cuda", "cuda")
    best: Stack | None = None
    names = [sys.executable, "python3", "python", "/usr/bin/python3"]
    for python in dict.fromkeys(p for name in names if (p := start.program(name))):
        if only_numpy or not _answers(python, "import torch, torch.utils.data"):
            continue
        if not gpus:
            return Stack(python, "torch")
        if _answers(python, "import torch; assert torch.cuda.is_available(); torch.zeros(1, device='cuda')"):
            return Stack(python, "torch", "cuda")
        best = best or Stack(python, "torch", why="the PyTorch that is installed cannot use the GPU")
    if gpus and not only_numpy and _answers(sys.executable, _TRY_CUDA):
        return Stack(sys.executable, "cuda", "cuda")
    if best is not None:
        return best
    if _answers(sys.executable, "import numpy"):
        return Stack(sys.executable, "numpy", why="PyTorch is not installed")
    raise UsageError(detail="it needs NumPy or PyTorch", hint=f"{sys.executable} -m pip install numpy")


_TRY_CUDA = "from cuda.bindings import driver; assert driver.cuInit(0)[0] == 0 and driver.cuDeviceGetCount()[1]"


def _answers(python: str, program: str) -> bool:
    try:
        done = start.run([python, "-c", program], env=_environment(), capture_output=True, timeout=_START_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _environment() -> dict[str, str]:
    """What the training's Python gets, and who tries it: PyTorch may be where PYTHONPATH says (HPC modules)."""
    python_path = ":".join(start.folders("PYTHONPATH"))
    return start.environment({"PYTHONPATH": python_path} if python_path else {})


class Training:
    """A run of the training in a folder of its own. Use as a context manager: it is ended on the way out.

    Args:
        folder: made; the losses and the log are kept in it.
        stack: what to run it with.
        steps: how many.
        pace: seconds of sleep after each.
        visible: uuids of the GPUs it is to see, with commas, or "" for all.
    """

    written: tuple[str, ...] = ("losses",)
    """The files that its losses are in."""

    def __init__(self, folder: Path, stack: Stack, steps: int, pace: float, visible: str = ""):
        self.folder = folder
        self.steps = steps
        folder.mkdir()
        options = [str(folder), "--framework", stack.framework, "--device", stack.device]
        options += ["--steps", str(steps), "--pace", str(pace)]
        env = {**_environment(), **({"CUDA_VISIBLE_DEVICES": visible} if visible else {})}
        self.root: Identity = self._start(stack, options, env)
        # Restored ones have the same; torchrun gives each rank one of its own. Each with the time at which its leader
        # was started: once all of a session have ended its number may be that of a stranger's.
        self._sessions = {self.root.pid: self.root.start_time}
        self._codes: dict[int, int] = {}
        self._closing = threading.Event()
        self._reaper = threading.Thread(target=self._reap, daemon=True)
        self._reaper.start()

    def _start(self, stack: Stack, options: list[str], env: dict[str, str]) -> Identity:
        command = [stack.python, _program(PROGRAMS[stack.framework]), *options]
        return launch(command, self.folder / "log", cwd=self.folder, env=env).identity

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *_: object) -> None:
        for _attempt in range(100):
            left = self._processes()
            for pid in left:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            if not left:
                break
            time.sleep(0.05)
        self._closing.set()
        self._reaper.join(5)

    def _reap(self) -> None:
        """Reaps what is ours of the job, and nothing else: whoever calls waitpid(-1) steals others' exit codes.

        While the demo is the nearest subreaper that includes orphans, which some containers' init never reaps, and a
        pid that is not reaped is a pid that cannot be restored.
        """
        while not self._closing.wait(0.02):
            for pid in _children():
                with contextlib.suppress(OSError, LimosaError):
                    stat = read_stat(pid)
                    if stat.sid in self._sessions and stat.ended:
                        self._codes[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def restored(self, pid: int) -> None:
        """Says that the job is a new process now."""
        self.root = Identity.of(pid)
        self._processes()  # notes the new leaders
        self._codes.pop(pid, None)

    def gpus(self) -> dict[int, list[str]]:
        """The GPUs that each process holds memory on, by NVML: pid → uuids."""
        there = gpu.inventory().gpus
        found = {pid: [one.uuid for one in there if one.holds(pid)] for pid in self._processes()}
        return {pid: on for pid, on in found.items() if on}

    def _processes(self) -> list[int]:
        """Pids of the job's processes, those among them whose parent has ended."""
        there = snapshot()
        below = descendants(self.root.pid, there) if self.root.alive() else []
        for sid in {there[pid].sid for pid in below if pid in there}:
            self._sessions[sid] = there[sid].start_time if sid in there else 0
        return [stat.pid for stat in there.values() if self._is_ours(stat.sid, there)]

    def _is_ours(self, sid: int, there: Mapping[int, Stat]) -> bool:
        """Whether a session is the job's: its leader is, or has ended before the others."""
        return sid in self._sessions and (sid not in there or there[sid].start_time == self._sessions[sid])

    def lines(self) -> list[list[str]]:
        """Step, loss (hex float; of several ranks: all of theirs) and time stamp of each finished step.

        Raises:
            LimosaError: a step is missing or there twice.
        """
        each = [self._lines_of(self.folder / name) for name in self.written]
        steps = zip(*each, strict=False)
        return [[step[0][0], " ".join(line[1] for line in step), max(line[2] for line in step)] for step in steps]

    def _lines_of(self, path: Path) -> list[list[str]]:
        try:
            text = path.read_text()
        except FileNotFoundError:
            return []
        found = [line.split() for line in text.rpartition("\n")[0].splitlines()]
        if [line[0] for line in found] != [str(n) for n in range(len(found))]:
            raise LimosaError(detail=f"steps are missing or double in {path}")
        return found

    def losses(self) -> list[str]:
        """The losses so far, as hex floats."""
        return [line[1] for line in self.lines()]

    def longest_gap(self, since: float) -> float:
        """The longest time without a step since ``since`` (CLOCK_MONOTONIC), by the job's own clock, in seconds."""
        times = [float(line[2]) for line in self.lines()]
        return max((b - a for a, b in itertools.pairwise(times) if b >= since), default=0.0)

    def wait_for(self, step: int, seen: Callable[[int], None]) -> None:
        """Waits until ``step`` steps are done.

        Args:
            step: how many.
            seen: told how many there are, several times a second; may raise.

        Raises:
            LimosaError: the job ended, or made no step for a long time.
        """
        done, limit = -1, time.monotonic() + _START_SECONDS
        while True:
            alive = self.root.alive()
            now = len(self.lines())
            seen(now)
            if now != done:
                done, limit = now, time.monotonic() + (_STEP_SECONDS if now else _START_SECONDS)
            if now >= step:
                return
            if not alive or time.monotonic() > limit:
                what = "has ended" if not alive else "makes no steps any more"
                raise LimosaError(f"the training {what} at step {now}: {self._last_words()}", job_state="unknown")
            time.sleep(0.05)

    def wait_for_end(self, seen: Callable[[int], None]) -> None:
        """Waits until it has done all steps and ended well.

        Raises:
            LimosaError: it did not.
        """
        self.wait_for(self.steps, seen)
        limit = time.monotonic() + _STEP_SECONDS
        while self.root.pid not in self._codes and time.monotonic() < limit:
            if not self.root.alive():
                time.sleep(0.2)  # the reaper's turn; a restored job that init has adopted never comes
                break
            time.sleep(0.02)
        if self.root.alive() or self._codes.get(self.root.pid, 0) != 0:
            raise LimosaError(f"the training did not end well: {self._last_words()}", job_state="unknown")

    def _last_words(self) -> str:
        with contextlib.suppress(OSError):
            return (self.folder / "log").read_text(errors="replace").strip()[-500:] or "it said nothing"
        return "it left no log"


class Ranks(Training):
    """Two processes, each with a GPU, that talk over NCCL: started by ``limosa run``, as such a job has to be."""

    written = ("losses-0", "losses-1")

    def _start(self, stack: Stack, options: list[str], env: dict[str, str]) -> Identity:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command = [stack.python, *(torchrun if stack.framework == "torch" else []), _program("ranks.py"), *options]
        env = {**env, "OMP_NUM_THREADS": "1", "NCCL_NVLS_ENABLE": "0"}
        return job.run(command, log=self.folder / "log", cwd=self.folder, env=env, detach=False).identity


def _program(name: str) -> str:
    return str(Path(__file__).with_name(name))


def _children() -> list[int]:
    """Pids of this process's children (proc_pid_children(5)), of all its threads."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError):
                found += map(int, Path(f"/proc/self/task/{thread}/children").read_text().split())
    return found
