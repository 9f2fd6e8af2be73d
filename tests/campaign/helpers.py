"""Vault and mover in the campaign: forked from a warm process, found by their names, asked what they hold."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support import pids

NAMES = {"limosa-vault": "vault", "limosa-mover": "mover"}
MAINS = ("vault_main.py", "mover_main.py")


def helper_pids() -> dict[str, int]:
    """The vault and the mover that live in this pid namespace, where there are any."""
    found = {}
    for pid in pids():
        with contextlib.suppress(OSError):
            name = NAMES.get(Path(f"/proc/{pid}/comm").read_text().strip())
            if name and Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X"):
                found[name] = pid
    return found


def held() -> dict[str, int]:
    """How many descriptors the vault holds, by key; a vault is not started for that."""
    from limosa.parking.packets import receive, send
    from limosa.parking.vault import socket_path

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(5)
        try:
            connection.connect(str(socket_path(os.geteuid())))
            send(connection, {"verb": "keys"})
            return dict(receive(connection)[0]["keys"])
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
    """Forks a process for each kind of helper while this one has one thread; each becomes it when it is wanted."""
    from limosa.parking import mover, vault

    spare = {main: _fork(main) for main in MAINS if main != "vault_main.py" or "vault" not in helper_pids()}
    real = vault.spawn

    def spawn(
        main: str, search_path: str, argv: Sequence[str], *, uid: int | None = None, fd: int | None = None
    ) -> Any:
        if main not in spare:
            return real(main, search_path, argv, uid=uid, fd=fd)
        connection, process = spare.pop(main)
        with connection:
            socket.send_fds(connection, [json.dumps(list(argv)).encode()], [] if fd is None else [fd])
        return process

    for module in (vault, mover):
        if hasattr(module, "spawn"):
            module.spawn = spawn  # type: ignore[attr-defined]


def _fork(main: str) -> tuple[socket.socket, Forked]:
    import limosa.parking.mover_main
    import limosa.parking.vault_main

    limosa.parking.vault_main.LOOK_SECONDS = 0.2
    mains = {"vault_main.py": limosa.parking.vault_main.main, "mover_main.py": limosa.parking.mover_main.main}
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
        words, fds, _, _ = socket.recv_fds(theirs, 1 << 16, 1)
        if words:
            theirs.close()
            argv = json.loads(words)
            code = mains[main]([str(fds[0])] if fds else argv)
    finally:
        os._exit(code)
