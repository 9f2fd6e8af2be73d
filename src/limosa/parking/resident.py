"""The residents, vault and mover, from Limosa's side: found by a socket, started where there is none.

Each user whose jobs are parked has one of each, in his runtime folder and with his rights; root that works on a user's
job uses that user's, and starts them for him. The mover that writes or reads an image is the caller's: it works in a
folder that is the caller's. They are started by the first operation that needs them, in a session of their own, as
nobody's children, and in the cgroup of that operation.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

from limosa.errors import FailedUndone, LimosaError
from limosa.parking.packets import peer, receive, send
from limosa.parking.resident_main import TELLS
from limosa.process.identity import Handle, Identity
from limosa.process.runtime import own_folder, runtime_dir

_SEARCH_PATH = "LIMOSA_RESIDENT_SYS_PATH"
_BOOT = f"""
import importlib, json, os, sys
came_up, tells = os.pipe()
child = os.fork()
if child:
    os.close(tells)
    os._exit(0 if os.read(came_up, 1) else min(255, abs(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))))
os.close(came_up)
os.environ["{TELLS}"] = str(tells)
sys.path[:] = json.loads(os.environ.pop("{_SEARCH_PATH}"))
os._exit(importlib.import_module(f"limosa.parking.{{sys.argv[1]}}_main").main(sys.argv[2:]))
"""
"""Who starts it waits until it listens; it is nobody's child then: whoever calls Limosa may be a job itself."""
START_SECONDS = 15.0
ANSWER_SECONDS = float(os.environ.get("LIMOSA_ANSWER_SECONDS", "5"))
"""A resident that has not answered a greeting for so long hangs."""
_FOR_USERS = frozenset({"PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PYTHONPATH"})
_WHAT = {
    "vault": "the vault, which holds a job's memory while it is moved,",
    "mover": "the mover, which copies device memory,",
}


class Found(NamedTuple):
    """A resident that answers: the connection to it, who it is, and what it said of itself."""

    connection: socket.socket
    identity: Identity
    said: dict[str, Any]


def socket_path(kind: str, uid: int) -> Path:
    """Return where a user's vault or mover listens.

    Who sees another /dev sees other GPUs, so there is a mover for each.
    """
    folder = own_folder(kind) if uid == os.geteuid() else runtime_dir().path / str(uid) / kind
    return folder / ("socket" if kind == "vault" else f"socket-{os.stat('/dev').st_dev}")


def connect(kind: str, uid: int) -> Found:
    """Return a connection to a user's resident, which is started where there is none.

    A mover that does not answer is ended and replaced: nothing is lost with it. A vault never is.

    Raises:
        FailedUndone: it does not answer, or cannot be started.
    """
    path, end = socket_path(kind, uid), time.monotonic() + START_SECONDS
    started: subprocess.Popen[bytes] | None = None
    while True:
        found = look_for(kind, uid)
        if found is not None:
            return found
        if started is None:
            started = start(kind, uid)
        elif started.poll() not in (None, 0):
            raise FailedUndone(f"{_WHAT[kind]} cannot be started for uid {uid} (it ended with {started.returncode})")
        if time.monotonic() > end:
            raise FailedUndone(f"{_WHAT[kind]} does not start ({path})")
        time.sleep(0.01)


def look_for(kind: str, uid: int) -> Found | None:
    """Return a connection to a user's resident, or None where there is none that answers."""
    path = socket_path(kind, uid)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    connection.settimeout(ANSWER_SECONDS)
    identity: Identity | None = None
    try:
        connection.connect(str(path))
        pid, owner = peer(connection)
        if owner != uid:
            raise FailedUndone(f"{path} is not uid {uid}'s {kind}")
        identity = Identity.of(pid)
        send(connection, {"verb": "ping"})
        said, _ = receive(connection)
        if not said.get("retiring"):
            return Found(connection, identity, said)
    except (FileNotFoundError, NotADirectoryError, ConnectionError, EOFError):
        pass
    except (TimeoutError, BlockingIOError):  # the latter: so many wait that connecting would
        if kind == "vault":
            connection.close()
            raise FailedUndone(f"{_WHAT[kind]} does not answer (process {identity.pid if identity else '?'})") from None
        replace(path, identity)
    except BaseException as error:
        connection.close()
        if isinstance(error, LimosaError) and not isinstance(error, FailedUndone):
            return None  # it ended meanwhile
        raise
    connection.close()
    return None


def replace(path: Path, identity: Identity | None) -> None:
    """End a mover that hangs, by pid and start time, and let its name be another's."""
    if identity is not None:
        with contextlib.suppress(LimosaError, OSError), Handle(identity) as handle:
            handle.signal(9)
            handle.wait(1.0)
    with contextlib.suppress(OSError):
        os.unlink(path)


def start(kind: str, uid: int) -> subprocess.Popen[bytes]:
    """Start a user's vault or mover. Two at once are no harm: only one can have the name.

    Raises:
        OSError: it cannot be started.
    """
    mine = uid == os.geteuid()
    environment = {
        k: v
        for k, v in os.environ.items()
        if k != "LD_PRELOAD" and (mine or k in _FOR_USERS or k.startswith("LIMOSA_"))  # he may read its environment
    }
    environment[_SEARCH_PATH] = json.dumps([os.path.abspath(entry) for entry in sys.path if entry])
    if not mine:
        environment["LIMOSA_RUNTIME_DIR"] = str(runtime_dir().path)
    process = subprocess.Popen(
        [sys.executable, "-I", "-c", _BOOT, kind, str(uid)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        env=environment,
        start_new_session=True,
    )
    threading.Thread(target=process.wait, name="limosa-resident-starts", daemon=True).start()  # it leaves no zombie
    return process


def residents(kind: str) -> list[Found]:
    """Return connections to those that live and that the caller may talk to: his own; for root, everybody's."""
    found = []
    uids = {os.geteuid()}
    if os.geteuid() == 0:
        with contextlib.suppress(OSError):
            uids |= {int(p.name) for p in runtime_dir().path.iterdir() if p.name.isascii() and p.name.isdigit()}
    for uid in sorted(uids):
        with contextlib.suppress(FailedUndone, OSError):
            if (one := look_for(kind, uid)) is not None:
                found.append(one)
    return found
