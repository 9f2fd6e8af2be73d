"""A node of software GPUs for a test: one process holds it, programs are started in it, and all of them end with it.

Usage (the fixture ``node`` of ``tests/softgpu/conftest.py`` starts one and ends it)::

    with Node(gpus=2, memory="64MiB") as node:
        node.run(["ls", "/dev"])                       # a program; fails the test where its exit code is not 0
        node.python("import pynvml; …")                # Python source
        node.limosa("gpus", "-o", "json").json         # the command line
        job = node.popen([sys.executable, "job.py"])   # a subprocess.Popen; ended with the node
        node.switches.lose(1)                          # limosa_softgpu.faults.Switches
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec
import pytest
import warm

from limosa.cli.options import parse_size
from limosa_softgpu.faults import Switches
from limosa_softgpu.node import enter, environment, join
from limosa_softgpu.spec import NodeSpec, make_spec
from limosa_softgpu.state import NODE_FOLDER


class Holder:
    """The process that is the node: forked, since a Python that starts only for this takes longer than the node.

    It ends when its standard input does, or with the thread that made it.

    Raises:
        AssertionError: the node cannot be made.
    """

    def __init__(self, spec: NodeSpec):
        stdin, self._stdin = os.pipe()
        told, stdout = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of the child's threads: it needs none
            self.pid = os.fork()
        if self.pid == 0:
            self._hold(spec, stdin, stdout)
        os.close(stdin)
        os.close(stdout)
        with open(told, encoding="utf-8") as file:
            words = file.read()
        if words != "ready":
            self.end()
            raise AssertionError(f"the node does not start:\n{words}")

    def _hold(self, spec: NodeSpec, stdin: int, stdout: int) -> NoReturn:
        try:
            with contextlib.suppress(OSError):
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            os.dup2(os.open(os.devnull, os.O_RDWR), 1)
            os.dup2(1, 2)
            os.dup2(stdin, 0)
            os.dup2(stdout, 3)
            os.closerange(4, 1 << 16)  # the ends of others' pipes
            words = "ready"
            try:
                enter(spec)
            except Exception as error:
                words = f"{type(error).__name__}: {error}"
            os.write(3, words.encode())
            os.close(3)
            while os.read(0, 64):
                pass
        finally:
            os._exit(0)

    def ended(self) -> bool:
        """Whether it was ended."""
        return self.pid == 0

    def end(self) -> None:
        """SIGKILL; a second time nothing happens."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            os.close(self._stdin)
            self.pid = 0


class Answer:
    """What a program in the node said."""

    def __init__(self, argv: Sequence[str], rc: int, stdout: str, stderr: str, seconds: float):
        self.argv, self.rc, self.stdout, self.stderr, self.seconds = argv, rc, stdout, stderr, seconds

    @property
    def json(self) -> Any:
        return json.loads(self.stdout)

    def __repr__(self) -> str:
        return f"{list(self.argv)} exited {self.rc}\n{self.stdout[-3000:]}\n{self.stderr[-3000:]}"


N = TypeVar("N", bound="Node")
_PR_SET_PDEATHSIG = 1
ROOT = Path(__file__).parent.parent


@contextlib.contextmanager
def several(make: Callable[..., N]) -> Iterator[Callable[..., N]]:
    """What starts nodes by ``make``; all of them are ended at the end."""
    if os.geteuid() != 0:
        pytest.fail("a node has mounts of its own, which only root can make: sudo make test-soft")
    with contextlib.ExitStack() as nodes:
        yield lambda **options: nodes.enter_context(make(**options))


def network() -> str:
    """The network that a program would be in which this thread starts."""
    return os.readlink("/proc/thread-self/ns/net")


class Node:
    """Starts at once; ``close`` ends every process in it."""

    warm = False  # whether command lines are forked from a process that has imported Limosa (``warm.py``)
    _network = network()  # where those are

    def __init__(
        self,
        gpus: int = 2,
        memory: str | Sequence[str] = "64MiB",
        chip: str | Sequence[str] = "H200",
        *,
        like: str | None = None,
        driver: str = "580.159.04",
        faults: Sequence[str] = (),
        speeds: Sequence[str] = (),
        costs: Sequence[str] = (),
        rates: dict[str, float] | None = None,
    ):
        sizes = [memory] if isinstance(memory, str) else memory
        chips = [chip] if isinstance(chip, str) else chip
        spec: NodeSpec = make_spec(
            gpus,
            [parse_size(s) for s in sizes],
            list(chips),
            like=like,
            speeds=speeds,
            costs=costs,
            driver_version=driver,
            faults=faults,
        )
        if rates:
            spec = msgspec.structs.replace(spec, rates=msgspec.structs.replace(spec.rates, **rates))
        self.spec = spec
        self._started: list[subprocess.Popen[Any]] = []
        self._holder = Holder(spec)
        self.pid = self._holder.pid
        self.folder = f"/proc/{self.pid}/root{NODE_FOLDER}"
        self.switches = Switches(self.folder)
        self._namespace = os.readlink(f"/proc/{self.pid}/ns/mnt")

    # --- programs --------------------------------------------------------------------------------------------

    def popen(self, argv: Sequence[object], *, env: dict[str, str] | None = None, **options: Any) -> Any:
        """Starts a program in the node; options as for ``subprocess.Popen`` (standard input is /dev/null)."""
        pid = self.pid
        options.setdefault("stdin", subprocess.DEVNULL)
        process = subprocess.Popen(
            [str(word) for word in argv],
            env=self.environment(env),
            preexec_fn=lambda: join(pid),  # noqa: PLW1509 - it only makes system calls
            **options,
        )
        self._started.append(process)
        return process

    def add(self, process: Any) -> None:
        """A program that was started in it otherwise: it ends with the node."""
        self._started.append(process)

    @staticmethod
    def environment(env: dict[str, str] | None = None) -> dict[str, str]:
        """What a program in the node is started with; ``env`` is more of it."""
        return environment({**os.environ, "NO_COLOR": "1", "PYTHONUNBUFFERED": "1", **(env or {})})

    def run(self, argv: Sequence[object], *, rc: int | None = 0, limit: float = 120, **options: Any) -> Answer:
        """Runs a program to its end; a time-out is a failure, and so is another exit code than ``rc`` (None: any)."""
        begin = time.monotonic()
        process = self.popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)
        try:
            stdout, stderr = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            process.kill()
            stdout, stderr = process.communicate()
            raise AssertionError(f"{list(argv)} did not end within {limit} s:\n{stdout}\n{stderr}") from None
        answer = Answer([str(word) for word in argv], process.returncode, stdout, stderr, time.monotonic() - begin)
        assert rc is None or answer.rc == rc, answer
        return answer

    def python(self, code: str, *arguments: object, **options: Any) -> Answer:
        """Runs Python source in the node."""
        return self.run([sys.executable, "-c", code, *arguments], **options)

    def limosa(self, *arguments: object, **options: Any) -> Answer:
        """Runs the command line in the node."""
        if self.warm and self._network == network() and not options.keys() - {"env", "rc", "limit"}:
            return self._warm_limosa(arguments, **options)
        return self.run([sys.executable, "-m", "limosa", *arguments], **{"limit": 120, **options})

    def _warm_limosa(
        self, arguments: Sequence[object], *, env: dict[str, str] | None = None, rc: int | None = 0, limit: float = 120
    ) -> Answer:
        begin = time.monotonic()
        with tempfile.TemporaryFile("w+") as stderr:
            whole = self.environment(env)
            process = warm.limosa(arguments, env=whole, cwd=os.getcwd(), node=self.pid, stderr=stderr)
            try:
                stdout, _ = process.communicate(limit)
            except subprocess.TimeoutExpired:
                process.kill()
                stderr.seek(0)
                raise AssertionError(f"{arguments} did not end within {limit} s:\n{stderr.read()}") from None
            stderr.seek(0)
            said = stderr.read()
        answer = Answer(list(process.args), process.wait(), stdout, said, time.monotonic() - begin)
        assert rc is None or answer.rc == rc, answer
        return answer

    # --- the node itself -------------------------------------------------------------------------------------

    def log(self) -> list[str]:
        """The node's log."""
        return self.switches.log()

    def blocks(self) -> list[str]:
        """The files of device memory that there are."""
        return sorted(os.listdir(os.path.join(self.folder, "memory")))

    def processes(self) -> list[int]:
        """All that live in it but its holder."""
        found = []
        for entry in os.listdir("/proc"):
            if entry.isdigit() and int(entry) != self.pid:
                with contextlib.suppress(OSError):
                    if os.readlink(f"/proc/{entry}/ns/mnt") == self._namespace:
                        found.append(int(entry))
        return found

    def close(self) -> None:
        """Ends everything in it; nothing of it is left then. A second time nothing happens."""
        if self._holder.ended():
            return  # the name of its namespace may be another node's by now, whose processes are not ours
        end = time.monotonic() + 60
        while (left := self.processes()) and time.monotonic() < end:
            for pid in left:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            for process in self._started:
                process.poll()
            time.sleep(0.002)
        self._holder.end()
        for process in self._started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1)
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()

    def __enter__(self: N) -> N:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def make_the_folder_of_all(node: Any) -> None:
    """Makes the folder in which users have theirs: only root can, and does with its first operation."""
    words = "from limosa.process.places import own_folder; own_folder('journals')"
    node.run([sys.executable, "-c", words])


def let_all_reach(node: Any, path: Path) -> None:
    """Lets everybody in the node come to a folder, which may lie in somebody's home that is closed to others."""
    for closed in reversed(path.parents):
        if closed.stat().st_mode & 0o005 != 0o005:
            within = closed / path.relative_to(closed).parts[0]
            words = 'm=$(mktemp -d); mount --bind "$2" "$m"; mount -t tmpfs -o mode=755 none "$1"; mkdir "$2"'
            node.run(["sh", "-ec", f'{words}; mount --move "$m" "$2"; rmdir "$m"', "sh", closed, within])
            return  # in the node alone, and only what leads to it is there
