"""The resident worker process: makes the driver calls that may hang, and outlives its controller.

Started by :class:`limosa.gpu.Driver`; nothing of the command line has to be loaded. It has a session of its own and
ignores what a terminal or an impatient parent sends: a driver call under way must not be lost. When its controller is
gone and the calls under way are done, it turns into the controller's will, if there is one; else it waits for another
controller, where it was told to, or ends.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from typing import Any, NoReturn

_SHIELDED = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGTSTP,
    signal.SIGTTIN,
    signal.SIGTTOU,
)


_ENDING = (signal.SIGTERM, signal.SIGHUP)
"""What ends a worker that waits: a service manager that stops everything would wait for it, and so would a reset."""


def table() -> dict[str, Callable[..., Any]]:
    """Return the calls that this worker makes; each loads what it needs when it is first made."""

    def driver_call(name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            from limosa.gpu import driver

            return getattr(driver, name)(*args)

        return call

    def inventory() -> Any:
        from limosa.gpu.nvml import inventory as ask

        return ask()

    def facts() -> Any:
        from limosa.gpu.facts import driver_facts

        return driver_facts()

    names = ("available", "state", "restore_thread_id", "lock", "checkpoint", "restore", "unlock")
    return {**{name: driver_call(name) for name in names}, "inventory": inventory, "facts": facts}


def main(argv: list[str]) -> NoReturn:
    """Run the worker.

    Args:
        argv: the descriptors of the socketpair's end and of the controller's pidfd; where to wait for the next
            controller, "" for nowhere.

    Does not return: a will replaces the process.
    """
    for number in _SHIELDED:
        signal.signal(number, signal.SIG_IGN)
    for variable in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        os.environ.pop(variable, None)
    path = argv[2]
    if path:
        if os.fork():
            os._exit(0)  # a controller may be a job itself, and what waits is none of that job's processes
        os.setsid()
    try:
        with open("/proc/self/comm", "w", encoding="ascii") as file:
            file.write("limosa-worker")
    except OSError:
        pass
    connection, controller = socket.socket(fileno=int(argv[0])), int(argv[1])
    for fd in (connection.fileno(), controller):
        os.set_inheritable(fd, False)
    _serve(connection, controller, path)


def _serve(connection: socket.socket, controller: int, path: str) -> NoReturn:
    """Serve one controller after another."""
    from limosa.gpu.worker_loop import serve
    from limosa.ipc.frames import Reply, Sender

    calls, initialised = table(), False
    while True:
        if path:
            try:
                Sender(connection).send(Reply(0, os.getpid()))
            except OSError:
                pass  # it has gone already; what it said counts
        left = serve(connection, calls, controller)
        os.close(controller)
        if left.wills:
            become(left.wills)
        initialised = initialised or left.initialised
        if not path or not initialised or left.spoilt:
            os._exit(0)  # the driver may keep threads that a normal exit would wait for
        found = _next(path, connection)
        if found is None:
            os._exit(0)
        connection, controller = found


def _next(path: str, last: socket.socket) -> tuple[socket.socket, int] | None:
    """Wait for the next controller; whoever waits owes nothing, and ends when it is told to."""
    from limosa.gpu.worker_idle import next_controller

    def told(number: int, frame: object) -> NoReturn:
        raise SystemExit

    try:
        for number in _ENDING:
            signal.signal(number, told)
        return next_controller(path, last)
    except SystemExit:
        return None
    finally:
        for number in _ENDING:
            signal.signal(number, signal.SIG_IGN)


def become(wills: list[list[str]]) -> NoReturn:
    """Replace this process by a command, of several by the last; each has default signals and no descriptors of ours.

    Raises:
        OSError: it cannot be started.
    """
    for number in _SHIELDED:
        signal.signal(number, signal.SIG_DFL)
    for entry in os.listdir("/proc/self/fd"):
        if int(entry) > 2:
            try:
                os.set_inheritable(int(entry), False)
            except OSError:
                pass  # the descriptor of the listing itself
    for argv in wills[:-1]:
        try:
            os.posix_spawn(argv[0], argv, os.environ, setsid=True)
        except OSError:
            pass  # the others are to be done all the same
    os.execvpe(wills[-1][0], wills[-1], os.environ)  # noqa: S606 - the controller's own command, no shell
