"""What tests share beside fixtures: victims (real programs under test) and how their processes are ended for sure."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import pickle
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from limosa.errors import LimosaError
from limosa.process.identity import read_stat

VICTIMS = Path(__file__).parent / "victims"


def open_the_way_to(*paths: Path) -> None:
    """Lets everybody come to these through the folders above, of which pytest keeps its own closed at each start.

    No less than before is open: /tmp may be one of them.
    """
    for folder in (above for path in paths for above in path.parents):
        folder.chmod(folder.stat().st_mode | 0o055)


def let_in_by_a_list(path: Path, uid: int) -> None:
    """Gives a file an access control list (acl(5)): u::rwx u:UID:rwx g::r-x m::rwx o::r-x.

    Raises:
        OSError: its file system has none.
    """
    entries = [(1, 7, -1), (2, 7, uid), (4, 5, -1), (16, 7, -1), (32, 5, -1)]
    data = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *entry) for entry in entries)
    os.setxattr(path, "system.posix_acl_access", data)


def stat_of(pid: int) -> tuple[int, int, str] | None:
    """(parent, session, state) of a process, or None."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return int(fields[1]), int(fields[3]), fields[0].decode()


def has_ended(pid: int) -> bool:
    """Whether nothing of a process runs any more; what is left may be a zombie.

    A main thread that ends before the others is one, too: until the last has, files and device memory are held.
    """
    try:
        return read_stat(pid).ended
    except LimosaError:
        return True


def pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def own_network() -> None:
    """Moves the calling thread, and what it starts from here on, to a new network with a loopback device and no more.

    Raises:
        OSError: not permitted.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(0x40000000):  # CLONE_NEWNET
        raise OSError(ctypes.get_errno(), "unshare")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        up = struct.pack("16sH14x", b"lo", 0x1)  # struct ifreq, IFF_UP
        fcntl.ioctl(any_socket, 0x8914, up)  # SIOCSIFFLAGS


def end_session(session: int) -> None:
    """Ends every process of a session and every descendant of it, and reaps what is ours. By pid, never by name."""
    for _ in range(1000):
        found = {pid: stat for pid in pids() if (stat := stat_of(pid)) is not None}
        doomed = {pid for pid, (_, sid, _) in found.items() if sid == session}
        while more := {pid for pid, (parent, _, _) in found.items() if parent in doomed} - doomed:
            doomed |= more
        doomed.discard(os.getpid())
        for pid in doomed:  # all at once: multiprocessing's tracker removes semaphores of whom it outlives
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGSTOP)
        for pid in doomed:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        if all(has_ended(pid) and found[pid][0] != os.getpid() for pid in doomed):
            return
        time.sleep(0.02)
    raise AssertionError(f"processes of session {session} do not end")


def end_marked(mark: str) -> None:
    """Ends every process that was started with ``mark`` ("NAME=value") in its environment, and reaps what is ours."""
    wanted = b"\0" + mark.encode() + b"\0"
    for _ in range(1000):
        doomed = []
        for pid in pids():
            with contextlib.suppress(OSError):
                if wanted in b"\0" + Path(f"/proc/{pid}/environ").read_bytes() + b"\0" and pid != os.getpid():
                    doomed.append(pid)
        for pid in doomed:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        if not doomed:
            return
        time.sleep(0.02)
    raise AssertionError(f"processes {doomed} do not end")


class Reaper:
    """Reaps ended jobs at once, with all that was theirs: what is in another session than we are, as jobs are."""

    def __init__(self) -> None:
        self._roots: set[int] = set()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name="reaper", daemon=True)
        self._thread.start()

    def watch(self, pid: int) -> None:
        """From now on reap this job whenever it ends; it may come back."""
        self._roots.add(pid)

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._ended.wait(0.005):
            for pid in list(self._roots):
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            with contextlib.suppress(ChildProcessError):
                if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                    self._orphans()

    def _orphans(self) -> None:
        for name in os.listdir("/proc"):
            if not name.isdigit():
                continue
            with contextlib.suppress(OSError, ChildProcessError):
                fields = Path(f"/proc/{name}/stat").read_bytes().rpartition(b")")[2].split()
                if fields[0] == b"Z" and int(fields[1]) == os.getpid() and int(fields[3]) != os.getsid(0):
                    os.waitpid(int(name), os.WNOHANG)


def semaphore_names(pid: int) -> set[Path]:
    """All names of a job's semaphores, which have its pid in them (``common.own_semaphores``) or are given to CRIU.

    And of its named shared memory (``named_shm.py``).

    Tests run side by side: what another's job has in that folder is none of theirs.
    """
    inodes: dict[Path, int] = {}
    for path in Path("/dev/shm").iterdir():
        with contextlib.suppress(FileNotFoundError):
            inodes[path] = path.lstat().st_ino
    own = {inode for path, inode in inodes.items() if path.name.startswith((f"sem.mp-{pid}-", f"shm-{pid}-"))}
    return {path for path, inode in inodes.items() if inode in own}


def quickest(call: Callable[[], Any], most: float, tries: int = 5) -> float:
    """How long a call takes at best; again only where it took longer than that: who is held up only takes longer."""
    took = 1e9
    for _ in range(tries):
        begun = time.monotonic()
        call()
        took = min(took, time.monotonic() - begun)
        if took < most:
            break
    return took


# Limosa, killed with its worker as the last thing that it does: nobody has told that the operation is done.
# A worker that has waited for it is nobody's child, and would recover what it has left: it has one of its own.
_KILLED = """
import contextlib, os, signal, sys
os.environ["LIMOSA_DRIVER_IDLE"] = "0"
from limosa.operation.journal import Journal
def end(*_):
    for task in os.listdir("/proc/self/task"):
        children = ""
        with contextlib.suppress(OSError):  # a thread that has just ended
            children = open(f"/proc/self/task/{task}/children").read()
        for pid in children.split():
            with contextlib.suppress(OSError):
                if b"limosa.gpu.worker_main" in open(f"/proc/{pid}/cmdline", "rb").read():
                    os.kill(int(pid), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
WHERE
from limosa.cli.main import entry
entry(sys.argv[1:])
"""
KILLED_AT_THE_END = _KILLED.replace("WHERE", "Journal.finish = end")
KILLED_AS_IT_WAS_COMMITTED = _KILLED.replace(
    "WHERE",
    """note = Journal.try_note
Journal.try_note = lambda *words, **data: end() if words[1:3] == ("commit", "done") else note(*words, **data)""",
)
"""CRIU still waits for the answer, and lets the job go on."""
KILLED_AS_IT_CAME_BACK = _KILLED.replace(
    "WHERE",
    """note = Journal.note
Journal.note = lambda *words, **data: end() if words[1:3] == ("criu-restore", "done") else note(*words, **data)""",
)
"""The runtime, or CRIU, has brought the job back, and nobody has noted that."""


class Victim:
    """A program under test: its own session, standard streams on files, as ``limosa run`` would start it.

    Attributes:
        pid: its root, also its session's id; a restored one has the same.
        folder: its working folder; ``log`` is in it.
    """

    def __init__(self, argv: Sequence[str], folder: Path, env: dict[str, str] | None = None):
        self.argv = list(argv)
        self.folder = folder
        self.log = folder / "log"
        folder.mkdir(parents=True, exist_ok=True)
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                self.argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=folder,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})},
                start_new_session=True,
            )
        self.pid = self._process.pid

    def text(self) -> str:
        """What it has written."""
        return self.log.read_text(errors="replace")

    def ticks(self) -> list[float]:
        """Its own time stamps (CLOCK_MONOTONIC)."""
        whole = self.text().rpartition("\n")[0]
        return [float(line.split()[2]) for line in whole.splitlines() if line.startswith("tick ")]

    def losses(self, rank: int | None = None) -> list[str]:
        """A training's losses so far, as hex floats; fails where a step is missing or double."""
        path = self.folder / ("losses" if rank is None else f"losses-{rank}")
        lines = [line.split() for line in path.read_text().rpartition("\n")[0].splitlines()] if path.exists() else []
        assert [int(line[0]) for line in lines] == list(range(len(lines)))
        return [line[1] for line in lines]

    def alive(self) -> bool:
        """Whether it runs (zombies do not)."""
        return not has_ended(self.pid)

    def until(self, true: Callable[[], bool], limit: float = 90, what: str = "") -> None:
        """Waits for something to become true while it runs; fails with its log otherwise."""
        end = time.monotonic() + limit
        while not true():
            if not self.alive() and not true():
                raise AssertionError(f"{self.argv} has ended while waiting {what}:\n{self.text()[-3000:]}")
            if time.monotonic() > end:
                raise AssertionError(f"{self.argv}: no {what or 'answer'} within {limit} s:\n{self.text()[-3000:]}")
            time.sleep(0.01)

    def wait_for(self, text: str, limit: float = 90) -> None:
        """Waits until its log holds ``text``."""
        self.until(lambda: text in self.text(), limit, f"for {text!r}")

    def goes_on(self, ticks: int = 3, limit: float = 90) -> None:
        """Waits until it has made some more ticks: it runs, now."""
        before = len(self.ticks())
        self.until(lambda: len(self.ticks()) >= before + ticks, limit, "for ticks")

    def reap(self, limit: float = 60) -> int:
        """Waits for the end of a victim that is still our child; its exit code, negative for a signal."""
        return self._process.wait(limit)

    def finish(self, limit: float = 120) -> None:
        """Tells it to stop and waits until it has checked itself a last time and ended well."""
        (self.folder / "stop").touch()
        self.ended_well(limit)

    def ended_well(self, limit: float = 120) -> None:
        """Waits until it has ended by itself, its last word being DONE."""
        end = time.monotonic() + limit
        while self.alive():
            assert time.monotonic() < end, f"{self.argv} does not end:\n{self.text()[-3000:]}"
            time.sleep(0.01)
        assert "DONE" in self.text().splitlines()[-3:], f"{self.argv} ended badly:\n{self.text()[-3000:]}"
        if self._process.poll() is not None and self._process.returncode != -signal.SIGKILL:
            assert self._process.returncode == 0

    def kill(self) -> None:
        """Ends it and all that belongs to it."""
        end_session(self.pid)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.1)


def as_user(uid: int, call: Callable[[], Any]) -> Any:
    """Call a function in a child of this process that has become another user, with no way back and no groups.

    What it raises is raised here as an AssertionError that says so: whoever expects it catches it in the function.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        try:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            told = ("gave", call())
        except BaseException as error:
            told = ("raised", f"{type(error).__name__}: {error}")
        with open(writer, "wb") as out:
            pickle.dump(told, out)
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as file:
        data = file.read()
    os.waitpid(child, 0)
    how, value = pickle.loads(data)
    assert how == "gave", f"uid {uid}: {value}"
    return value


@contextlib.contextmanager
def meanwhile(uid: int, call: Callable[[], Any]) -> Iterator[None]:
    """Have a child that has become another user make a call all the while; it is killed in the end, or with us."""
    child = os.fork()
    if not child:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
        with contextlib.suppress(BaseException):
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # who changes his user loses it
            call()
        os._exit(0)
    try:
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
