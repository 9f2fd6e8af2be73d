"""The vault from Limosa's side: found or started, given descriptors, asked for them.

Each user has one of his own, in his runtime folder; root that works on a user's job uses that user's. It is started by
the first operation that needs it, in a session of its own, in the cgroup of that operation, and ends a minute after
it holds nothing any more.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from limosa.errors import FailedUndone
from limosa.parking.packets import MOST, peer_uid, receive, send
from limosa.parking.vault_main import SEARCH_PATH
from limosa.process.runtime import own_folder

START_SECONDS = 5.0


class Vault:
    """A connection to a user's vault.

    Args:
        uid: whose; the caller's own, or, for root, anybody's.
        limit: seconds for an answer.

    Raises:
        FailedUndone: it is not there and cannot be started.
    """

    def __init__(self, uid: int | None = None, limit: float = 10.0):
        self.uid = os.geteuid() if uid is None else uid
        self.limit = limit
        self._connection = connect(self.uid, limit)

    def put(self, key: str, fds: Sequence[int], note: bytes = b"") -> None:
        """Have descriptors held under a key, instead of what it held; ours stay ours."""
        for start in range(0, max(1, len(fds)), MOST):
            part = fds[start : start + MOST]
            more = start + MOST < len(fds)
            send(self._connection, {"verb": "put", "key": key, "note": note, "more": more}, part)
        answer = self._answer()[0]
        if answer.get("n") != len(fds):
            raise FailedUndone(f"the vault holds {answer.get('n')} of {len(fds)} descriptors of {key}")

    def get(self, key: str) -> tuple[list[int], bytes]:
        """Return descriptors, which are the caller's to close, and the note.

        Raises:
            KeyError: nothing is held under that key.
        """
        send(self._connection, {"verb": "get", "key": key})
        found: list[int] = []
        while True:
            message, fds = receive(self._connection)
            found += fds
            if "error" in message:
                raise KeyError(key)
            if not message["more"]:
                return found, message["note"]

    def drop(self, key: str) -> int:
        """Let go of a key; returns how many descriptors it held."""
        return int(self._ask({"verb": "drop", "key": key})["n"])

    def keys(self) -> dict[str, int]:
        """Return how many descriptors are held, by key."""
        found: dict[str, int] = self._ask({"verb": "keys"})["keys"]
        return found

    def pid(self) -> int:
        """Return its process."""
        return int(self._ask({"verb": "ping"})["pid"])

    def close(self) -> None:
        """End the connection; what is held stays held."""
        self._connection.close()

    def __enter__(self) -> Vault:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        send(self._connection, message)
        return self._answer()[0]

    def _answer(self) -> tuple[dict[str, Any], list[int]]:
        message, fds = receive(self._connection)
        if "error" in message:
            raise FailedUndone(f"vault: {message['error']}")
        return message, fds


def socket_path(uid: int) -> Path:
    """Return where a user's vault listens."""
    return own_folder("vault") / f"{uid}.socket"


def connect(uid: int, limit: float) -> socket.socket:
    """Return a connection to a user's vault, which is started where there is none.

    Raises:
        FailedUndone: it cannot be started.
    """
    path = socket_path(uid)
    end = time.monotonic() + START_SECONDS
    started: subprocess.Popen[bytes] | None = None
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        connection.settimeout(limit)
        try:
            connection.connect(str(path))
            if peer_uid(connection) != uid:
                raise FailedUndone(f"{path} is not uid {uid}'s vault")
            return connection
        except (FileNotFoundError, ConnectionRefusedError):
            connection.close()
        if started is None:
            started = start(uid, path)
        if time.monotonic() > end:
            raise FailedUndone("the vault, which holds a job's memory while it is moved, does not start")
        time.sleep(0.01)


def start(uid: int, path: Path) -> subprocess.Popen[bytes]:
    """Start a user's vault. Two at once are no harm: only one can have the socket.

    Raises:
        OSError: it cannot be started.
    """
    return spawn("vault_main.py", SEARCH_PATH, [str(path)], uid=uid)


def spawn(
    main: str, search_path: str, argv: Sequence[str], *, uid: int | None = None, fd: int | None = None
) -> subprocess.Popen[bytes]:
    """Start one of the helpers: a session of its own, "/" to work in, nothing of ours but one descriptor.

    Args:
        main: its file in this folder.
        search_path: the variable that tells it where modules are.
        argv: what it is told.
        uid: as whom, where that is not the caller.
        fd: the descriptor.

    Raises:
        OSError: it cannot be started.
    """
    environment = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
    environment[search_path] = json.dumps([os.path.abspath(entry) for entry in sys.path if entry])
    other: dict[str, Any] = {} if uid in (None, os.geteuid()) else {"user": uid, "extra_groups": []}
    return subprocess.Popen(
        [sys.executable, "-I", str(Path(__file__).with_name(main).resolve()), *argv],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        env=environment,
        pass_fds=() if fd is None else (fd,),
        start_new_session=True,
        **other,
    )
