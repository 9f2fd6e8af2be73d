"""What the tests of images share: small images to spoil, and ``Files`` that note, fail or die at a step."""

from __future__ import annotations

import errno
import os
import signal
import threading
from pathlib import Path

from limosa.image import Chunks, DeviceMemory, DevicePiece, Draft, Image, JobRecord, Manifest, TreeProcess
from limosa.image.files import Files
from limosa.image.manifest import GpuRecord, OpenFile

CONTENTS = {
    "core-41.img": b"registers" * 30,
    "core-42.img": b"registerz" * 30,  # as long as the first: only the hash tells them apart
    "inventory.img": b"\x58\x31\x31\x54" + bytes(60),
    "pages-1.img": bytes(range(256)) * 20,
}
UUID = "GPU-6b1fbd7e-0000-1111-2222-333344445555"
CHUNK = 4 << 20
# Two pieces of device memory: the first is longer than a chunk, and begins as the second one is.
MEMORY = [bytes(CHUNK) + b"weights" * 90, bytes(CHUNK)]


def manifest(**changes: object) -> Manifest:
    """A manifest that uses every field, but for ``files``."""
    fields: dict[str, object] = {
        "created": "2026-11-20T10:11:12Z",
        "criu": "4.2.1",
        "kernel": "6.18.0",
        "driver": "580.159.04",
        "machine": "x86_64",
        "hostname": "node7",
        "job": JobRecord(pid=41, name="träining", cwd="/home/u", log="/home/u/log\udcff", run=True, uid=1000, gid=1000),
        "tree": [
            TreeProcess(
                pid=41, ppid=1, start_time=990, command=["python", "t.py", ""], cuda=True, threads=[43],
                openable=[UUID], held={UUID: 4 << 30},
            ),
            TreeProcess(pid=42, ppid=41, start_time=991, command=["python\udc80"]),
        ],
        "options": {"leave_running": False, "ghost_limit": 1 << 20, "external": ["a", "b"], "cgroup": None},
        "gpus": [GpuRecord(index=0, uuid=UUID, name="NVIDIA H200", bytes=4 << 30, memory_total=141 << 30)],
        "open_files": [OpenFile(path="/home/u/log", size=77, pid=41, fd=1, flags=0o102001, position=77)],
        "nft_table": "CRIU-5c41aa3e-1234-4d3f-b",
    }  # fmt: skip
    return Manifest(**(fields | changes))  # type: ignore[arg-type]


def fill(draft: Draft, contents: dict[str, bytes] = CONTENTS) -> None:
    """Writes files to ``criu/`` the way CRIU does, with a mode of its own choosing."""
    for name, content in contents.items():
        fd = os.open(name, os.O_WRONLY | os.O_CREAT, 0o644, dir_fd=draft.criu_fd)
        os.write(fd, content)
        os.close(fd)


def write_image(dest: Path, files: Files | None = None, **changes: object) -> Image:
    """Writes a small image from beginning to end; what goes wrong is discarded, as users of Draft do."""
    with Draft.create(dest, operation="op-1", files=files) as draft:
        fill(draft)
        return draft.commit(manifest(**changes))


def write_chunked(dest: Path, files: Files | None = None, memory: list[bytes] = MEMORY, **changes: object) -> Image:
    """The same with device memory as chunks, among them one that nothing needs any more."""
    with Draft.create(dest, operation="op-1", files=files) as draft:
        with Chunks(draft.make_chunks(), files) as chunks:
            pieces = []
            for n, piece in enumerate(memory):
                parts = [piece[start : start + CHUNK] for start in range(0, len(piece), CHUNK)]
                names = [chunks.add(part)[0] for part in parts]
                pieces.append(DevicePiece(id=n + 3, bytes=len(piece), gpu=UUID, chunks=names))
            chunks.add(b"it has changed since")
        fill(draft)
        device = [DeviceMemory(pid=41, pieces=pieces)]
        return draft.commit(manifest(**{"chunk_bytes": CHUNK, "device": device, **changes}))


# Steps of docs/image-format.md by what is done to the disk, in the order in which they are first seen.
def step_of(label: str) -> str:
    """The documented step that a change noted by NotingFiles belongs to."""
    kind, _, name = label.partition(":")
    if name.endswith("unfinished.json"):
        return "end" if kind == "unlink" else "marker"
    if name.endswith("manifest.json"):
        return "manifest"
    if name.endswith("manifest.blake3"):
        return "hash"
    if kind == "put" or (kind == "mkdir" and (name == "chunks" or len(name) == 2)):
        return "store"
    if "/chunks" in name or len(Path(name).name) == 64:
        return "chunks"
    if kind == "mkdir":
        return name if name in ("criu", "log") else "folder"
    if kind == "rename":
        return "image"
    if kind == "syncfs":
        return "files"
    if name.endswith("/criu"):
        return "names"
    if ".limosa-partial-" in Path(name).name:
        return "whole"
    return "files" if "/criu/" in name else "parent"


def removal_step_of(label: str) -> str:
    """The same for ``remove``."""
    kind, _, name = label.partition(":")
    if kind == "rename":
        return "take"
    if kind == "fsync":
        return "forget"
    return "gone" if kind == "rmdir" and ".limosa-partial-" in name else "empty"


class NotingFiles(Files):
    """Notes every change in ``done``, and calls ``before`` and ``after`` around it."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self._lock = threading.RLock()  # fsync is called by several threads

    def before(self, label: str, n: int) -> None:
        pass

    def after(self, label: str, n: int) -> None:
        pass

    def _around(self, label: str, act):
        with self._lock:
            n = len(self.done)  # writing a file syncs it: changes nest
            self.before(label, n)
            self.done.append(label)
            result = act()
            self.after(label, n)
            return result

    def mkdir(self, name, dir_fd):
        return self._around(f"mkdir:{name}", lambda: Files.mkdir(self, name, dir_fd))

    def write(self, name, data, dir_fd):
        return self._around(f"write:{name}", lambda: Files.write(self, name, data, dir_fd))

    def put(self, name, data, dir_fd):
        return self._around(f"put:{name}", lambda: Files.put(self, name, data, dir_fd))

    def fsync(self, fd):
        return self._around(f"fsync:{os.readlink(f'/proc/self/fd/{fd}')}", lambda: Files.fsync(self, fd))

    def syncfs(self, fd):
        return self._around(f"syncfs:{os.readlink(f'/proc/self/fd/{fd}')}", lambda: Files.syncfs(self, fd))

    def chmod(self, fd, mode):
        return self._around(f"chmod:{os.readlink(f'/proc/self/fd/{fd}')}", lambda: Files.chmod(self, fd, mode))

    def rename(self, old, new, dir_fd):
        return self._around(f"rename:{old}>{new}", lambda: Files.rename(self, old, new, dir_fd))

    def unlink(self, name, dir_fd):
        return self._around(f"unlink:{name}", lambda: Files.unlink(self, name, dir_fd))

    def rmdir(self, name, dir_fd):
        return self._around(f"rmdir:{name}", lambda: Files.rmdir(self, name, dir_fd))


class FailingFiles(NotingFiles):
    """Fails the n-th change (from 0) with an error of the disk, once."""

    def __init__(self, n: int, number: int = errno.EIO) -> None:
        super().__init__()
        self.n = n
        self.number = number
        self.failed = ""

    def before(self, label: str, n: int) -> None:
        if n == self.n and not self.failed:
            self.failed = label
            raise OSError(self.number, os.strerror(self.number), label)


class DyingFiles(NotingFiles):
    """Kills this process with SIGKILL before the n-th change, or after it."""

    def __init__(self, n: int, when: str) -> None:
        super().__init__()
        self.n = n
        self.when = when

    def before(self, label: str, n: int) -> None:
        if self.when == "before" and n == self.n:
            os.kill(os.getpid(), signal.SIGKILL)

    def after(self, label: str, n: int) -> None:
        if self.when == "after" and n == self.n:
            os.kill(os.getpid(), signal.SIGKILL)


class DyingAtStep(NotingFiles):
    """Kills this process before the first change of a documented step, or after the last."""

    def __init__(self, step: str, when: str, last: int, names=step_of) -> None:
        super().__init__()
        self.step = step
        self.when = when
        self.last = last  # how many changes the step has
        self.names = names

    def _count(self) -> int:
        return sum(1 for label in self.done if self.names(label) == self.step)

    def before(self, label: str, n: int) -> None:
        if self.when == "before" and self.names(label) == self.step:
            os.kill(os.getpid(), signal.SIGKILL)

    def after(self, label: str, n: int) -> None:
        if self.when == "after" and self.names(label) == self.step and self._count() == self.last:
            os.kill(os.getpid(), signal.SIGKILL)
