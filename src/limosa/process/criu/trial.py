"""The trial: does this CRIU work here? It dumps, ends and restores a small real process and sees it go on.

Versions say little (``docs/criu.md``): the kernel, the capabilities and what a container forbids matter as much. The
trial runs in a process of its own, which adopts and reaps what it restores, so that the caller's children stay its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from limosa import start
from limosa.errors import CriuFailed, LimosaError
from limosa.process.criu import network
from limosa.process.criu.log import TAKEN
from limosa.process.criu.program import Criu
from limosa.process.criu.run import DumpOptions, RestoreOptions, dump, restore
from limosa.process.status import effective_capabilities
from limosa.structs import ready

LIMIT = 60.0  # seconds for all of it; 1 s is usual
STEP = 20.0  # seconds for one step of it
_PR_SET_CHILD_SUBREAPER = 36
_CAPABILITIES = {19: "CAP_SYS_PTRACE", 21: "CAP_SYS_ADMIN", 40: "CAP_CHECKPOINT_RESTORE"}


class TrialResult(msgspec.Struct, frozen=True):
    """How the trial went.

    Attributes:
        ok: the process was dumped, ended, restored, and went on.
        reason: why not, in a sentence; "" where it is ok.
        seconds: how long it took.
        network_lock: how connected sockets were kept quiet: "nftables", or "skip" where that does not work here.
        permitted: False where CRIU lacks a right rather than an ability.
    """

    ok: bool
    reason: str = ""
    seconds: float = 0.0
    network_lock: str = "nftables"
    permitted: bool = True


def missing_right(capabilities: int, uid: int) -> str:
    """Return why CRIU may not run at all with these capabilities, in a sentence; "" where it may be tried.

    Args:
        capabilities: as of :func:`limosa.process.status.effective_capabilities`.
        uid: the effective user id.
    """
    missing = [name for bit, name in _CAPABILITIES.items() if not capabilities >> bit & 1]
    if "CAP_SYS_ADMIN" not in missing or "CAP_CHECKPOINT_RESTORE" not in missing:
        missing = [name for name in missing if name == "CAP_SYS_PTRACE"]
    if not missing:
        return ""
    if "CAP_SYS_ADMIN" in missing:
        missing = [name for name in missing if name != "CAP_CHECKPOINT_RESTORE"]
        missing[missing.index("CAP_SYS_ADMIN")] += " (or CAP_CHECKPOINT_RESTORE)"
    who = "this container's root" if uid == 0 else f"uid {uid}"
    return f"{who} lacks {' and '.join(missing)}"


def trial(criu: Criu) -> TrialResult:
    """Try a CRIU.

    Args:
        criu: the one to try.

    Returns:
        How it went; a failed trial is an answer and raises nothing.
    """
    started = time.monotonic()
    reason = missing_right(effective_capabilities(), os.geteuid())
    if reason:
        return TrialResult(ok=False, reason=reason, permitted=False)
    try:
        done = start.run(
            start.python("limosa.process.criu.trial"),
            input=msgspec.json.encode(criu),
            capture_output=True,
            start_new_session=True,
            timeout=LIMIT,
        )
        result = msgspec.json.decode(done.stdout, type=ready(TrialResult))
    except subprocess.TimeoutExpired:
        return TrialResult(ok=False, reason=f"the trial has not ended after {LIMIT:g} s", seconds=LIMIT)
    except (OSError, msgspec.DecodeError) as error:
        return TrialResult(ok=False, reason=f"the trial could not be run: {error}", seconds=time.monotonic() - started)
    return msgspec.structs.replace(result, seconds=time.monotonic() - started)


class _Failed(Exception):
    """Carries the reason out of a step."""


def _attempt(criu: Criu, lock: str) -> None:
    """Dump, restore and look; raises _Failed or LimosaError."""
    folder = Path(tempfile.mkdtemp(prefix="limosa-trial-"))
    victim = Path(__file__).with_name("trial_victim.py")
    beat = folder / "beat"
    for name in ("images", "work"):
        (folder / name).mkdir(0o700)
    images = os.open(folder / "images", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    work = os.open(folder / "work", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    errors = os.open(folder / "errors", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    process = start.popen(
        [sys.executable, "-I", "-S", str(victim), str(beat)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=errors,
        start_new_session=True,
        cwd=str(folder),
    )
    table = None
    try:
        _wait_for_beats(beat, 3, folder)
        options = DumpOptions(tcp_established=True, network_lock=lock)
        table = dump(criu, process.pid, images, work, options, timeout=STEP).nft_table
        _reap_all()
        before = _beats(beat)
        if restore(criu, images, work, RestoreOptions(tcp_established=True), timeout=STEP) != process.pid:
            raise _Failed("CRIU restored the process under another pid")
        _wait_for_beats(beat, before + 3, folder)
    finally:
        _end(process.pid)
        if table is not None:  # the restore removes it, unless it failed
            with contextlib.suppress(LimosaError):
                network.remove_table(criu, table)
        for fd in (images, work, errors):
            os.close(fd)
        shutil.rmtree(folder, ignore_errors=True)


def _beats(beat: Path) -> int:
    """Return the number of the last round, 0 before the first."""
    try:
        lines = beat.read_text().split()
    except FileNotFoundError:
        return 0
    return int(lines[-1]) if lines else 0


def _wait_for_beats(beat: Path, number: int, folder: Path) -> None:
    """Wait until the victim has come to that round."""
    deadline = time.monotonic() + STEP
    while _beats(beat) < number:
        if time.monotonic() > deadline:
            said = (folder / "errors").read_text(errors="replace").strip().splitlines()
            raise _Failed(f"the small process of the trial stands still ({said[-1] if said else 'it says nothing'})")
        time.sleep(0.01)


def _reap_all() -> None:
    """Reap every child, as all have been ended (we adopt orphans); a zombie would keep its pid."""
    deadline = time.monotonic() + STEP
    while time.monotonic() < deadline:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.005)
        except ChildProcessError:
            return
    raise _Failed("processes that CRIU has dumped live on")


def _end(session: int) -> None:
    """End what is left of the victim: all our children and theirs are of its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(session, signal.SIGKILL)
    with contextlib.suppress(_Failed):
        _reap_all()


def main(argv: list[str]) -> int:
    """Read a Criu from stdin, try it, write the result to stdout.

    Args:
        argv: nothing.
    """
    del argv
    criu = msgspec.json.decode(sys.stdin.buffer.read(), type=ready(Criu))
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    result = TrialResult(ok=False)
    for lock in ("nftables", "nftables", "skip"):
        if lock == "nftables" and result.reason and TAKEN not in result.reason:
            continue  # the second time is for a pid that somebody else took between dump and restore
        try:
            _attempt(criu, lock)
        except (LimosaError, _Failed) as error:
            reason = str(error.fields["reason"]) if isinstance(error, CriuFailed) else str(error)
            result = TrialResult(ok=False, reason=result.reason or reason)
        else:
            result = TrialResult(ok=True, network_lock=lock)
            break
    sys.stdout.buffer.write(msgspec.json.encode(result))
    return 0
