"""Vault and mover in the campaign: forked from a warm process, found by their names, asked what they hold."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from typing import Any

from support import has_ended, pids

NAMES = {"limosa-vault": "vault", "limosa-mover": "mover"}
KINDS = tuple(NAMES.values())


def helper_pids() -> dict[str, int]:
    """The vault and the mover that live in this pid namespace, where there are any."""
    found = {}
    for pid in pids():
        with contextlib.suppress(OSError), open(f"/proc/{pid}/comm", encoding="ascii", errors="replace") as file:
            name = NAMES.get(file.read().strip())
            if name and not has_ended(pid):
                found[name] = pid
    return found


def held() -> dict[str, int]:
    """How many descriptors vault and mover hold, by key; neither is started for that."""
    return {**_asked("vault", "keys"), **{f"mover: {key}": n for key, n in _asked("mover", "keys").items()}}


def _asked(kind: str, verb: str) -> dict[str, int]:
    from limosa.ipc.messages import receive, send
    from limosa.parking.resident import Holding, socket_path

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(5)
        try:
            connection.connect(str(socket_path(kind, os.geteuid())))
            send(connection, {"verb": verb})
            return receive(connection, fds=0).read_as(Holding).keys
        except (OSError, EOFError):
            return {}


class Forked:
    """A child of ours that became a helper; what is needed of a Popen."""

    def __init__(self, pid: int):
        self.pid = pid
        self.returncode: int | None = None
        self._mutex = threading.Lock()

    def poll(self) -> int | None:
        """As a Popen's."""
        with self._mutex:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """As a Popen's."""
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired("helper", timeout or 0)
            time.sleep(0.002)
        return code

    def kill(self) -> None:
        """As a Popen's."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def fork_helpers() -> None:
    """Forks a process for each resident that is not there, while this one has one thread; it becomes it when wanted."""
    from limosa.parking import resident

    spare = {kind: _fork(kind) for kind in KINDS if kind not in helper_pids()}
    real = resident.start

    def start(kind: str, uid: int) -> Any:
        if kind not in spare:
            return real(kind, uid)
        connection, process = spare.pop(kind)
        with connection:
            connection.send(str(uid).encode())
        return process

    resident.start = start


def _fork(kind: str) -> tuple[socket.socket, Forked]:
    from limosa.parking import mover_main, vault_main

    vault_main.LOOK_SECONDS = 0.2
    mains = {"vault": vault_main.main, "mover": mover_main.main}
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid:
        theirs.close()
        return ours, Forked(pid)
    code = 1
    try:
        os.setsid()
        os.chdir("/")
        null = os.open("/dev/null", os.O_RDWR)
        for copy in range(3):
            os.dup2(null, copy)
        keep = theirs.fileno()
        os.closerange(3, keep)
        os.closerange(keep + 1, 1024)
        words = theirs.recv(64)
        if words:
            theirs.close()
            code = mains[kind]([words.decode()])
    finally:
        os._exit(code)
