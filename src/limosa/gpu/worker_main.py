"""The resident worker process: makes the driver calls that may hang, and outlives its controller.

Started by :class:`limosa.gpu.Driver`; nothing of the command line has to be loaded. It has a session of its own and
ignores what a terminal or an impatient parent sends: a driver call under way must not be lost. It ends when its
controller does: once the calls under way are done it turns into the controller's will, if there is one.
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
        argv: the descriptor of the socketpair's end, the controller's pid.

    Does not return: a will replaces the process.
    """
    for number in _SHIELDED:
        signal.signal(number, signal.SIG_IGN)
    for variable in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        os.environ.pop(variable, None)
    try:
        with open("/proc/self/comm", "w", encoding="ascii") as file:
            file.write("limosa-worker")
    except OSError:
        pass
    from limosa.gpu.worker_loop import serve

    connection = socket.socket(fileno=int(argv[0]))
    connection.set_inheritable(False)
    controller: int | None = None
    try:
        controller = os.pidfd_open(int(argv[1]))
    except OSError:
        pass  # it is gone already, or the kernel has no pidfd: the end of the stream says so as well
    if controller is not None and os.getppid() != int(argv[1]):
        # Whoever has that pid now is not our controller.
        os.close(controller)
        controller = None
    will = serve(connection, table(), controller)
    if will:
        become(will)
    os._exit(0)  # the driver may keep threads that a normal exit would wait for


def become(argv: list[str]) -> NoReturn:
    """Replace this process by a command: default signals, no descriptors but the standard three.

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
    os.execvpe(argv[0], argv, os.environ)  # noqa: S606 - the controller's own command, no shell
