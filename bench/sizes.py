"""How much of everything a job may have: written to disk, ended, restored, by bare CRIU and by Limosa, with times.

    python bench/sizes.py [--only shared,threads] [--largest 60000] [--out FOLDER] [--folder /dev/shm]

Each line of the table is one process (or tree) that has so many of one thing. It is dumped and restored by CRIU alone,
then by Limosa, which may also refuse it before anything is touched; afterwards it must have as many of the thing as
before, and run. Exit code 0 where no job was lost by Limosa: each came back, or was refused and runs on.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "src")]

import host  # noqa: E402
from report import Results, table  # noqa: E402

from limosa import operation  # noqa: E402
from limosa.errors import LimosaError, Refused  # noqa: E402
from limosa.process.criu.find import find  # noqa: E402
from limosa.process.identity import Identity  # noqa: E402
from limosa.process.tree import job_tree  # noqa: E402

SIZES = {
    "processes": [100, 1_000],
    "threads": [1_000, 10_000],
    "descriptors": [10_000, 100_000],
    "mappings": [10_000, 60_000, 65_000],
    "shared mappings": [3_000, 15_000, 40_000],
    "mapped files": [3_000, 15_000],
    "memfds": [3_000, 15_000],
    "pipes": [3_000, 15_000],
    "unix sockets": [3_000, 15_000],
    "listening sockets": [1_000, 10_000],
    "semaphores": [1_000, 10_000],
    "epoll targets": [10_000],
    "path length": [1_000, 3_900, 4_080],
    "folder's path length": [3_900],
}

JOB = r"""
import ctypes, mmap, os, resource, select, socket, sys, threading, time
what, n = sys.argv[1], int(sys.argv[2])
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
kept = []
libc = ctypes.CDLL(None, use_errno=True)
def deep(length):
    # a folder whose path is that long, entered step by step
    while length > 0:
        part = min(length - 1, 200)
        if part <= 0: break
        os.makedirs("d" * part, exist_ok=True)
        os.chdir("d" * part)
        length -= part + 1
if what == "processes":
    for _ in range(n - 1):
        if os.fork() == 0:
            while True: time.sleep(1000)
elif what == "threads":
    threading.stack_size(65536)
    for _ in range(n - 1):
        threading.Thread(target=time.sleep, args=(10**6,), daemon=True).start()
elif what == "descriptors":
    kept = [os.open("file", os.O_RDWR | os.O_CREAT) for _ in range(n)]
elif what == "mappings":
    size = mmap.PAGESIZE
    libc.mmap.restype = ctypes.c_void_p
    base = libc.mmap(None, ctypes.c_size_t(n * size), 3, 0x22, -1, 0)
    for i in range(0, n, 2):
        assert libc.mprotect(ctypes.c_void_p(base + i * size), size, 1) == 0, ctypes.get_errno()
        ctypes.memset(base + (i + 1) * size, 65, 8)
elif what == "shared mappings":
    for i in range(n):
        kept.append(mmap.mmap(-1, mmap.PAGESIZE)); kept[-1][:8] = i.to_bytes(8, "little")
elif what == "mapped files":
    os.mkdir("files")
    for i in range(n):
        fd = os.open(f"files/{i}", os.O_RDWR | os.O_CREAT); os.ftruncate(fd, mmap.PAGESIZE)
        libc.mmap(None, ctypes.c_size_t(mmap.PAGESIZE), 3, 1, fd, 0)
        os.close(fd)
elif what == "memfds":
    for i in range(n):
        kept.append(os.memfd_create("m")); os.write(kept[-1], b"x")
elif what == "pipes":
    kept = [os.pipe() for _ in range(n // 2)]
elif what == "unix sockets":
    kept = [socket.socketpair() for _ in range(n // 2)]
elif what == "listening sockets":
    for i in range(n):
        s = socket.socket(); s.bind((f"127.0.{i // 20000}.1", 0)); s.listen(1); kept.append(s)
elif what == "semaphores":
    import multiprocessing
    kept = [multiprocessing.Semaphore() for _ in range(n)]
elif what == "epoll targets":
    e = select.epoll(); kept = [os.eventfd(0) for _ in range(n)]
    for fd in kept: e.register(fd, select.EPOLLIN)
elif what == "path length":
    here = len(os.getcwd())
    home = os.open(".", os.O_RDONLY)
    deep(n - here - 12)
    kept = [open("f" * 10, "w")]
    os.fchdir(home); os.close(home)
elif what == "folder's path length":
    deep(n - len(os.getcwd()))
print("READY", flush=True)
while True:
    time.sleep(0.1)
"""


class Job(host.Job):
    """A process that has so many of one thing."""

    def __init__(self, what: str, count: int, folder: Path):
        self.folder = folder
        log = folder / "log"
        with open(log, "ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-c", JOB, what, str(count)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                cwd=folder,
                start_new_session=True,
            )
        self.pid = self.process.pid
        end = time.monotonic() + host.LIMIT
        while "READY" not in log.read_text():
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(log.read_text().strip().splitlines()[-1][:100])
            time.sleep(0.02)
        self.tree = [identity.pid for identity in job_tree(Identity.of(self.pid))]

    def has(self) -> dict[str, int]:
        """How much it has of everything."""
        at = Path(f"/proc/{self.pid}")
        try:
            return {
                "processes": len(job_tree(Identity.of(self.pid))),
                "threads": len(os.listdir(at / "task")),
                "descriptors": len(os.listdir(at / "fd")),
                "mappings": (at / "maps").read_bytes().count(b"\n"),
            }
        except (OSError, LimosaError):
            return {}

    def reaping(self) -> threading.Thread:
        """Reap it and all that was its, which comes to us, as soon as it has ended."""

        def reap() -> None:
            end = time.monotonic() + host.LIMIT
            while any(os.path.exists(f"/proc/{pid}") for pid in self.tree) and time.monotonic() < end:
                for pid in self.tree:
                    with contextlib.suppress(ChildProcessError):
                        os.waitpid(pid, os.WNOHANG)
                time.sleep(0.002)

        thread = threading.Thread(target=reap, daemon=True)
        thread.start()
        return thread

    def end(self) -> None:
        """End it, and its children."""
        for pid in self.tree:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        self.reaping().join(host.LIMIT)


def of_bare(what: str, count: int, base: Path) -> str:
    """CRIU alone: its times, or what it says."""
    folder = Path(tempfile.mkdtemp(prefix="limosa-sizes-", dir=base))
    job = None
    try:
        job = Job(what, count, folder)
        had = job.has()
        extra = ["--link-remap"] if what == "semaphores" else []
        for name in ("criu", "log"):
            (folder / "image" / name).mkdir(parents=True)
        reaper = job.reaping()
        criu = find()
        options = ["--tree", str(job.pid), "--ghost-limit", str(1 << 20), *extra]
        try:
            dumped = host.bare(criu, "dump", folder / "image", options)
        except RuntimeError as error:
            return f"dump: {_said(error)}"
        reaper.join(30)
        try:
            restored = host.bare(criu, "restore", folder / "image", ["--restore-detached", "--pidfile", "restore.pid"])
        except RuntimeError as error:
            return f"{dumped:.2f} s, **lost** at the restore: {_said(error)}"
        return f"{dumped:.2f} + {restored:.2f} s" if _same(had, job.has()) else f"**changed**: {had} {job.has()}"
    except RuntimeError as error:
        return f"not made: {error}"
    finally:
        if job is not None:
            job.end()
        shutil.rmtree(folder, ignore_errors=True)


def of_limosa(what: str, count: int, base: Path) -> tuple[str, bool, dict[str, Any]]:
    """Limosa: its times, or what it says; whether the job is safe; the times of its steps."""
    folder = Path(tempfile.mkdtemp(prefix="limosa-sizes-", dir=base))
    job = None
    steps: dict[str, Any] = {}
    try:
        job = Job(what, count, folder)
        had = job.has()
        reaper = job.reaping()
        begin = time.monotonic()
        try:
            written = operation.checkpoint(job.pid, folder / "image")
        except LimosaError as error:
            safe = _same(had, job.has())
            word = "refused" if isinstance(error, Refused) else "undone"
            return f"{word} ({error.id}): {str(error)[:160]}", safe, steps
        dumped = time.monotonic() - begin
        steps["checkpoint"] = written.timings
        reaper.join(30)
        begin = time.monotonic()
        try:
            restored = operation.restore(folder / "image", adopt=True)
        except LimosaError as error:
            return f"{dumped:.2f} s, **lost** at the restore ({error.id}): {str(error)[:160]}", False, steps
        took = time.monotonic() - begin
        steps["restore"] = restored.timings
        safe = _same(had, job.has())
        return (f"{dumped:.2f} + {took:.2f} s" if safe else f"**changed**: {had} {job.has()}"), safe, steps
    except RuntimeError as error:
        return f"not made: {error}", True, steps
    finally:
        if job is not None:
            job.end()
        shutil.rmtree(folder, ignore_errors=True)


def _same(had: dict[str, int], has: dict[str, int]) -> bool:
    """As many of everything; CRIU may split and join a few mappings (the vDSO's)."""
    return bool(had and has) and all(abs(had[key] - has[key]) <= (4 if key == "mappings" else 0) for key in had)


def _said(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if "Error" in line and "RLIMIT" not in line]
    return (lines[0].partition("): ")[2] if lines else str(error))[:120]


def main() -> int:
    """Measure all sizes and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="names of the first column, with commas")
    parser.add_argument("--largest", type=int, default=10**9)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--no-bare", action="store_true")
    given = parser.parse_args()
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: children of an ended job come to us
    only = [name.strip() for name in given.only.split(",") if name.strip()]
    rows, raw, well = [], [], True
    for what, counts in SIZES.items():
        for count in counts:
            if count > given.largest or (only and what not in only):
                continue
            bare = "" if given.no_bare else of_bare(what, count, given.folder)
            ours, safe, steps = of_limosa(what, count, given.folder)
            well &= safe
            rows.append([what, f"{count:,}", bare, ours])
            raw.append({"what": what, "count": count, "bare": bare, "limosa": ours, "safe": safe, "steps": steps})
            print(f"{what:20} {count:8,}  {bare:40}  {ours}", flush=True)
    if given.out is not None:
        results = Results("sizes", str(given.out))
        for figures in raw:
            results.add(**figures)
        results.page(table(["what", "how many", "bare CRIU", "Limosa"], rows))
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
