"""Command lines forked from a process that has imported all of Limosa: no start of Python for each of them.

A test that runs a hundred of them takes a third of the time. What is forked is a process as any other: it has its own
pid, environment, working folder and standard streams, is killed and signalled, and ends with an exit code. Its worker
is forked too, and so are vault and mover, by the warm process itself: they are nobody's children here either. Real
starts are what tests of the command line itself, of the residents and of containers are about.

There is one warm process for each environment in what is read when Limosa is imported (``LIMOSA_…``).
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import gc
import io
import json
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

STATUS = struct.Struct("i")
_OWN = "LIMOSA_RUNTIME_DIR"
"""Says whose a process is (``support.end_marked``): the warm one is nobody's."""
_READ_LATE = (_OWN, "LIMOSA_CONTAINER_STATE")
"""What Limosa reads when it needs it, and not when it is imported."""
_LIBRARIES = ("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH")
_FIRST_KEPT = 200
"""Descriptors from here on are a child's own business: where it asks the warm process for more."""
RESIDENT = "@resident"


class Forked:
    """A command line that was forked; what is needed of a ``subprocess.Popen``."""

    def __init__(self, args: Sequence[str], pid: int, connection: socket.socket, stdout: io.TextIOBase | None):
        self.args, self.pid, self.stdout = list(args), pid, stdout
        self.stdin = self.stderr = None
        self.returncode: int | None = None
        self._connection = connection
        self._lock = threading.Lock()

    def wait(self, timeout: float | None = None) -> int:
        """Waits for its end; its exit code, negative for a signal."""
        with self._lock:
            if self.returncode is None:
                self._connection.settimeout(timeout)
                try:
                    told = self._connection.recv(STATUS.size)
                except (TimeoutError, BlockingIOError):
                    raise subprocess.TimeoutExpired(self.args, timeout or 0.0) from None
                self._connection.close()
                assert told, "the warm process has ended"
                self.returncode = STATUS.unpack(told)[0]
            return self.returncode

    def poll(self) -> int | None:
        """Its exit code, None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """Waits for its end; what it has written to its standard output, where that is a pipe."""
        end = None if timeout is None else time.monotonic() + timeout
        text = b""
        if self.stdout is not None and not self.stdout.closed:
            with selectors.DefaultSelector() as ready, self.stdout:
                ready.register(self.stdout, selectors.EVENT_READ)
                while ready.select(None if end is None else max(0.0, end - time.monotonic())):
                    chunk = os.read(self.stdout.fileno(), 1 << 16)
                    text += chunk
                    if not chunk:
                        break
                else:
                    raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        self.wait(None if end is None else max(0.001, end - time.monotonic()))
        return text.decode(), None

    def send_signal(self, number: int) -> None:
        """Sends it a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)


class Warm:
    """A warm process; ``start`` forks."""

    _all: dict[tuple[Any, ...], Warm] = {}  # noqa: RUF012 - one for all tests of this process

    def __init__(self, env: Mapping[str, str], program: str):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, program, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                env={k: v for k, v in env.items() if k != _OWN},
                pass_fds=(theirs.fileno(),),
            )
        self._orders = ours
        self._orders.settimeout(120)

    @classmethod
    def of(cls, env: Mapping[str, str], program: str = __file__) -> Warm:
        """The one for an environment, of a program that calls :func:`serve`."""
        read = {k: v for k, v in env.items() if (k.startswith("LIMOSA_") and k not in _READ_LATE) or k in _LIBRARIES}
        key = (program, *sorted(read.items()))
        found = cls._all.get(key)
        if found is None or found.process.poll() is not None:
            found = cls._all[key] = cls(env, program)
        return found

    @staticmethod
    def send(orders: socket.socket, order: Mapping[str, Any], stdout: int, stderr: int) -> tuple[int, socket.socket]:
        """Has one forked; its pid, and where its end is told."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            fds = array.array("i", [theirs.fileno(), stdout, stderr])
            orders.sendmsg([json.dumps(order).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
        ours.settimeout(120)
        told = ours.recv(STATUS.size)
        assert told, "the warm process forks nothing"
        return STATUS.unpack(told)[0], ours

    def start(
        self,
        arguments: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: str | Path,
        node: int,
        stdout: int,
        stderr: int,
        halts: list[str] | None = None,
    ) -> tuple[int, socket.socket]:
        """Forks ``limosa …`` (or what another program makes of it) in a node; its pid, and where its end is told."""
        order = {"argv": list(arguments), "env": dict(env), "cwd": str(cwd), "node": node, "halts": halts}
        return self.send(self._orders, order, stdout, stderr)


def pids() -> list[int]:
    """The warm processes that there are."""
    return [one.process.pid for one in Warm._all.values() if one.process.poll() is None]


def limosa(
    arguments: Sequence[object],
    *,
    env: Mapping[str, str],
    cwd: str | Path,
    node: int,
    stdout: int = subprocess.PIPE,
    stderr: Any = None,
    halts: tuple[str, Path] | None = None,
) -> Forked:
    """Starts ``limosa …`` in the node that a process holds.

    Args:
        arguments: of the command line.
        env: its whole environment.
        cwd: its working folder.
        node: the pid of who holds the node.
        stdout: a descriptor, or ``subprocess.PIPE``.
        stderr: a file.
        halts: a step of its journal ("lock done") at which it stands still, and the file that is there meanwhile.
    """
    words = [str(word) for word in arguments]
    reading, writing = os.pipe() if stdout == subprocess.PIPE else (-1, stdout)
    try:
        more = [halts[0], str(halts[1])] if halts else None
        fds = {"stdout": writing, "stderr": stderr.fileno()}
        pid, ended = Warm.of(env).start(words, env=env, cwd=cwd, node=node, halts=more, **fds)
    finally:
        if reading >= 0:
            os.close(writing)
    file: Any = os.fdopen(reading, "rb", 0) if reading >= 0 else None
    return Forked(["limosa", *words], pid, ended, file)


# --- the warm process itself ---------------------------------------------------------------------------------------


def become(order: dict[str, Any], stdout: int, stderr: int) -> None:
    """The child: becomes the command line; does not return."""
    from campaign.controller import fork_worker

    from limosa.cli.main import entry
    from limosa.gpu import worker, worker_process
    from limosa_softgpu.node import join

    code: Any = 99
    try:
        os.environ.clear()
        os.environ.update(order["env"])
        null = os.open("/dev/null", os.O_RDONLY)
        for fd, copy in ((null, 0), (stdout, 1), (stderr, 2)):
            os.dup2(fd, copy)
        os.closerange(3, 64)
        os.chdir(order["cwd"])
        join(order["node"])
        if order["argv"][0] == RESIDENT:
            code = become_resident(*order["argv"][1:])
            return
        if order.get("halts"):
            _halt(*order["halts"])
        _have_residents_forked(order["node"])
        spare: list[Any] = []
        fork_worker(spare)
        real = worker_process.launch

        def launch(waits_at: str = "") -> Any:
            return spare.pop() if spare else real(waits_at)

        worker_process.launch = launch
        worker.Driver.__init__.__kwdefaults__["start"] = launch
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.argv = ["limosa", *order["argv"]]
        entry(order["argv"])
    except SystemExit as left:
        code = left.code or 0
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


def _halt(moment: str, there: str) -> None:
    """Has it stand still when it has journalled a step, the first time, as long as a file is there that it makes."""
    from limosa.operation.journal import Journal

    real, times = Journal.note, []

    def note(self: Journal, step: Any, phase: Any, *arguments: Any, **data: Any) -> None:
        real(self, step, phase, *arguments, **data)
        if f"{step} {phase}" == moment and not times:
            times.append(1)
            open(there, "w").close()
            while os.path.exists(there):
                time.sleep(0.001)

    Journal.note = note  # type: ignore[method-assign]


_asks: socket.socket | None = None


def _have_residents_forked(node: int) -> None:
    """Vault and mover that this command line starts are forked by the warm process; others' are started."""
    from limosa.parking import resident
    from limosa.start import environment

    real = resident.start

    def start(kind: str, uid: int) -> Any:
        if uid != os.geteuid() or _asks is None:
            return real(kind, uid)
        order = {"argv": [RESIDENT, kind, str(uid)], "env": environment(), "cwd": "/", "node": node, "halts": None}
        with open(os.devnull, "r+b", 0) as null:
            pid, ended = Warm.send(_asks, order, null.fileno(), null.fileno())
        return Forked([kind], pid, ended, None)

    resident.start = start


def become_resident(kind: str, uid: str) -> int:
    """The child: becomes a vault or mover; its exit code."""
    from limosa.parking import mover_main, vault_main

    os.closerange(_FIRST_KEPT, _FIRST_KEPT + 64)
    os.setsid()
    return {"vault": vault_main.main, "mover": mover_main.main}[kind]([uid])


def serve(
    orders: socket.socket, become: Callable[[dict[str, Any], int, int], None], more: socket.socket | None = None
) -> None:
    """Forks until nobody can ask any more; tells each end where it was asked.

    Args:
        orders: where it is asked.
        become: what a child does with an order and two descriptors; does not return.
        more: where its children ask.
    """
    children: dict[int, tuple[int, socket.socket]] = {}
    with selectors.DefaultSelector() as ready:
        ready.register(orders, selectors.EVENT_READ)
        if more is not None:
            ready.register(more, selectors.EVENT_READ)
        while True:
            for key, _ in ready.select():
                from_whom: Any = key.fileobj
                if from_whom not in (orders, more):
                    ready.unregister(key.fileobj)
                    os.close(key.fd)
                    pid, asker = children.pop(key.fd)
                    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    with asker, contextlib.suppress(OSError):
                        asker.send(STATUS.pack(status))
                    continue
                data, control, _, _ = from_whom.recvmsg(1 << 20, socket.CMSG_SPACE(3 * 4))
                if not data:
                    return
                told, stdout, stderr = array.array("i", control[0][2])
                asker = socket.socket(fileno=told)
                pid = os.fork()
                if pid == 0:
                    become(json.loads(data), stdout, stderr)
                os.close(stdout)
                os.close(stderr)
                asker.send(STATUS.pack(pid))
                end = os.pidfd_open(pid)
                children[end] = (pid, asker)
                ready.register(end, selectors.EVENT_READ)


def main() -> None:
    """The warm process."""
    import campaign.controller

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    campaign.controller.load()
    gc.collect()
    gc.freeze()
    theirs, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    global _asks
    _asks = socket.socket(fileno=fcntl.fcntl(ours, fcntl.F_DUPFD_CLOEXEC, _FIRST_KEPT))
    ours.close()
    serve(socket.socket(fileno=int(sys.argv[1])), become, theirs)


if __name__ == "__main__":
    main()
