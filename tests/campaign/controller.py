"""One ``limosa`` command line in a forked process, disturbed at a named point.

Points are those of ``e2e/disturbed_program.py``: the moments before and after everything that changes what is on disk
or who runs. A point's name with how often it was passed before ("before note lock begin", 2) is a step of a case, so
that a new step of Limosa is disturbed without a change here. What an order may say beside the command line:

    at: [{"name": …, "n": …, "do": "kill" | "signal" | "victim", …}]  what is done at these points
    disk: {"call": "write" | "fsync" | …, "n": …, "errno": …, "forever": …}
                                             that change below the campaign's folders fails
    record: note every point, driver call and disk change
    limits: the waits of Limosa, so that a driver that hangs is given up on in a second, not in half a minute
    file_size: RLIMIT_FSIZE
    worker: "exec" starts the driver's worker as the command line does; else it is forked from this warm process
    parked: the job is under the shim: what is asked of shim, mover and vault are points as well, and the two helpers
            are forked from this warm process
    boxed: the job is a container: what its runtime's program does is a point as well
    nofile: so many descriptors more than are open now may be opened
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from e2e.disturbed_program import Disturber as Points
from support import has_ended

from campaign import containers
from campaign.helpers import fork_helpers, helper_pids
from campaign.parked import POINTS
from campaign.processes import send_signal

DISK = ("open", "write", "fsync", "rename", "mkdir", "unlink", "rmdir", "fchmod")


def load() -> None:
    """Imports all that a command line imports, so that children have it."""
    import pynvml
    import rich.console
    from cuda.bindings import driver

    import limosa.cli.main as command
    import limosa.demo.command
    import limosa.gpu.driver
    import limosa.gpu.nvml
    import limosa.gpu.worker_main
    import limosa.operation.orphan
    import limosa.parking.mover_main
    import limosa.parking.vault_main

    for name in command.VERBS:
        if name not in ("demo",):
            command.verb(name)
    # What reads a command line imports more when it reads the first one.
    command.verb("move").make_context("move", ["1", "--to", "1"])
    assert all((limosa, pynvml, rich, driver))


# --- the worker --------------------------------------------------------------------------------------------------


class _Forked:
    """A child that is the driver's worker; what is needed of a Popen."""

    def __init__(self, pid: int):
        self.pid = pid
        self._status: int | None = None
        self._mutex = threading.Lock()

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            with self._mutex:  # two threads wait for it
                if self._status is None:
                    pid, status = os.waitpid(self.pid, os.WNOHANG)
                    if pid:
                        self._status = os.waitstatus_to_exitcode(status)
                if self._status is not None:
                    return self._status
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired("worker", timeout or 0)
            time.sleep(0.002)


def fork_worker(spare: list[Any]) -> None:
    """Forks a worker while this process has one thread; ``launch`` hands it out."""
    from limosa.gpu.worker_main import main
    from limosa.gpu.worker_process import Launched

    ours, theirs = socket.socketpair()
    words = os.memfd_create("limosa-worker-stderr")
    controller = os.pidfd_open(os.getpid())
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.chdir("/")
        null = os.open("/dev/null", os.O_RDWR)
        for fd, copy in ((null, 0), (null, 1), (words, 2)):
            os.dup2(fd, copy)
        first, second = sorted((theirs.fileno(), controller))
        os.closerange(3, first)
        os.closerange(first + 1, second)
        os.closerange(second + 1, 1024)
        try:
            os._exit(main([str(theirs.detach()), str(controller), ""]))
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    theirs.close()
    os.close(controller)
    spare.append(Launched(ours, _Forked(pid), words))


# --- disturbing ----------------------------------------------------------------------------------------------------


class Disturber(Points):
    """Does what the order says when its point comes."""

    def __init__(self, order: dict[str, Any], pipe: int):
        super().__init__({}, pipe)
        self.order = order
        self.targets = list(order.get("at", []))
        self.quiet = True
        self.record = bool(order.get("record"))
        self.passed: dict[str, int] = {}
        self.workers: list[Any] = []
        self.runtime = 0  # a container runtime's program that is at work
        self.mutex = threading.Lock()

    def at(self, name: str) -> None:
        """A point is passed."""
        with self.mutex:
            n = self.passed[name] = self.passed.get(name, -1) + 1
        if self.record:
            self.say(point=name, n=n, living=sorted(self.living()))
        for wanted in [one for one in self.targets if (one["name"], one["n"]) == (name, n)]:
            self.targets.remove(wanted)
            self.say(at=f"{name} {n}")
            getattr(self, "do_" + wanted["do"])(wanted)

    def worker(self) -> int | None:
        """The newest worker, also where no Work has begun (``recover`` has none)."""
        return next((one.pid for one in reversed(self.workers) if not one.dead and one.pid), None)

    def living(self) -> dict[str, int]:
        """Who of Limosa's processes lives, by what he is called; vault and mover where a job is parked."""
        found = {**super().living(), **(helper_pids() if self.order.get("parked") else {})}
        return {**found, **containers.at_work(self.runtime)} if self.runtime else found

    def install(self) -> None:
        """Makes everything that is to be disturbed a point."""
        super().install()
        if self.order.get("boxed"):
            containers.watch(self)
        if not self.order.get("parked"):
            return
        for who, names in POINTS.items():
            module = importlib.import_module(f"limosa.parking.{who}")
            owner = getattr(module, who.capitalize())
            for name in names:
                if hasattr(owner, name):
                    self.around(owner, name, lambda *_, _text=f"{name} of the {who}", **__: _text)

    def watch_workers(self) -> None:
        """Keeps every worker that is started."""
        from limosa.gpu.worker_process import WorkerProcess

        original = WorkerProcess.__init__

        def started(this: Any, *args: Any, **kwargs: Any) -> None:
            original(this, *args, **kwargs)
            self.workers.append(this)

        WorkerProcess.__init__ = started  # type: ignore[method-assign]

    def do_kill(self, wanted: dict[str, Any]) -> None:
        """SIGKILL for those of Limosa's processes, in this order; the worker and limosa at the same moment."""
        living = self.living()
        who = [one for one in wanted["who"] if one in living]
        for missing in set(wanted["who"]) - set(who):
            self.say(missing=missing)
        self.say(killed=who)
        together = [living[one] for one in ("limosa", "worker") if one in who and "limosa" in who]
        for one in who:
            if living[one] not in together:
                send_signal(living[one], signal.SIGKILL)  # it may just have ended
                _until(lambda pid=living[one]: has_ended(pid))
        if together and os.fork() == 0:  # one alone would let the other do its part: another worker, the will
            for pid in together:
                os.kill(pid, signal.SIGKILL)
            os._exit(0)
        elif together:
            time.sleep(10)

    def do_signal(self, wanted: dict[str, Any]) -> None:
        """A signal for ourselves, as from a terminal or an init; more than one after one another."""
        for name in wanted["signals"]:
            os.kill(os.getpid(), getattr(signal, name))
            time.sleep(0.01)

    def do_victim(self, wanted: dict[str, Any]) -> None:
        """The victim does something now; the room makes it so and says when it is done."""
        self.say(victim=wanted["what"])
        _until(lambda: os.path.exists(wanted["flag"]))

    # calls, disk ------------------------------------------------------------------------------------------------

    def watch_calls(self) -> None:
        """Notes the driver's calls in their order and each look at NVML, where it is recorded."""
        import pynvml

        from limosa.gpu.worker_process import WorkerProcess

        submit, count = WorkerProcess.submit, pynvml.nvmlDeviceGetCount

        def submitted(this: Any, call: str, pid: int, args: list[Any], fd: int = -1) -> Any:
            self.say(call=call)
            return submit(this, call, pid, args, fd)

        def counted() -> Any:
            self.say(call="nvml")
            return count()

        WorkerProcess.submit = submitted  # type: ignore[method-assign]
        pynvml.nvmlDeviceGetCount = counted

    def watch_disk(self, roots: list[str], fail: dict[str, Any] | None) -> None:
        """Counts every change below ``roots`` by kind; makes the chosen one fail."""
        counts: dict[str, int] = {}

        def below(path: Any, dir_fd: int | None) -> bool:
            if isinstance(path, int):
                try:
                    kind = os.fstat(path).st_mode
                    name = os.readlink(f"/proc/self/fd/{path}") if stat.S_ISREG(kind) or stat.S_ISDIR(kind) else ""
                except OSError:
                    return False
            else:
                name = os.fsdecode(path)
                if dir_fd is not None and not name.startswith("/"):
                    name = os.readlink(f"/proc/self/fd/{dir_fd}") + "/" + name
            return any(name.startswith(root) for root in roots)

        def wrap(call: str) -> None:
            original = getattr(os, call)

            def wrapper(path: Any, *args: Any, **kwargs: Any) -> Any:
                dir_fd = kwargs.get("dir_fd", kwargs.get("src_dir_fd"))
                if not below(path, dir_fd):
                    return original(path, *args, **kwargs)
                with self.mutex:
                    n = counts[call] = counts.get(call, -1) + 1
                if self.record:
                    self.say(disk=call)
                if (
                    fail is not None
                    and fail["call"] == call
                    and (n == fail["n"] or (n > fail["n"] and fail.get("forever")))
                ):
                    self.say(at=f"{call} {n}")
                    raise OSError(fail["errno"], os.strerror(fail["errno"]), path if isinstance(path, str) else None)
                return original(path, *args, **kwargs)

            setattr(os, call, wrapper)

        for call in DISK:
            wrap(call)
        os.replace = os.rename


def _until(true: Callable[[], bool], limit: float = 10.0) -> None:
    end = time.monotonic() + limit
    while not true() and time.monotonic() < end:
        time.sleep(0.001)


def limits(told: dict[str, float]) -> None:
    """Shortens what Limosa waits for."""
    from limosa.gpu import nvml, worker
    from limosa.operation import driver_steps

    for name, value in told.items():
        if ":" in name:
            module = importlib.import_module(name.partition(":")[0])
            setattr(module, name.partition(":")[2], value)
            continue
        owner: Any = next(module for module in (driver_steps, worker, nvml) if hasattr(module, name))
        setattr(owner, name, value)


def open_here() -> dict[int, str]:
    """The descriptors that this process has, but for those that libnvidia-ml keeps as long as a process lives."""
    found = {int(fd): readlink(fd) for fd in os.listdir("/proc/self/fd")}
    return {fd: where for fd, where in found.items() if where and not where.startswith("/dev/nvidia")}


def readlink(fd: str) -> str:
    """Where a descriptor of this process leads; empty where it is closed by now."""
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


def run(order: dict[str, Any], pipe: int) -> None:
    """The child: installs what disturbs it and becomes a ``limosa`` command line; does not return."""
    code: int | str | None = 0
    disturber = Disturber(order, pipe)
    before: dict[int, str] = {}
    try:
        os.environ["LIMOSA_DRIVER_IDLE"] = "0"  # of what takes over (wills), too: nothing is to be left
        spare: list[Any] = []
        if order.get("worker") != "exec":
            fork_worker(spare)
            from limosa.gpu import worker, worker_process

            real = worker_process.launch

            def launch(waits_at: str = "") -> Any:
                return spare.pop() if spare else real(waits_at)

            worker_process.launch = launch
            worker.Driver.__init__.__kwdefaults__["start"] = launch
        if order.get("parked") and order.get("worker") != "exec":
            fork_helpers()
        from limosa.gpu import worker_idle

        worker_idle.IDLE_SECONDS = 0.0  # workers that wait have tests of their own
        os.environ.update(order.get("env", {}))
        limits(order.get("limits", {}))
        if order.get("points", True):
            disturber.watch_workers()
            disturber.install()
        if disturber.record:
            disturber.watch_calls()
        if disturber.record or order.get("disk"):
            disturber.watch_disk(order["roots"], order.get("disk"))
        if order.get("file_size") is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (order["file_size"], resource.RLIM_INFINITY))
        if order.get("nofile") is not None:
            most = max(map(int, os.listdir("/proc/self/fd"))) + order["nofile"]
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        before = open_here()
        from limosa.cli.main import entry

        disturber.say(began=True)
        entry(order["argv"])
    except SystemExit as left:
        code = left.code
    except BaseException as error:
        disturber.say(crash=f"{type(error).__name__}: {error}"[:500])
        traceback.print_exc()
        code = 98
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # one that comes now comes too late
    with contextlib.suppress(Exception):
        for one in spare:  # never needed: it ends with our end of the pair
            one.connection.close()
            os.close(one.words)
        now = open_here()
        grown = [where for fd, where in sorted(now.items()) if before.get(fd) != where]
        disturber.say(descriptors=len(now) - len(before) + 2 * len(spare), new=grown)
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 0)


def answer(folder: str) -> dict[str, Any]:
    """The JSON that a command line has printed; empty where it has printed none."""
    with contextlib.suppress(OSError, ValueError), open(f"{folder}/stdout", "rb") as file:
        found: dict[str, Any] = json.loads(file.read())
        return found
    return {}
