"""The locks that a job holds on files: noted while it is frozen, and all checked before a restored job runs.

CRIU loses the POSIX locks on files that a process also maps; Limosa's plugin takes them again
(``native/criu/locks.c``). A job that lacks a lock which it believes to have destroys data (SQLite's ``-shm``, LMDB's
``lock.mdb``). So Limosa checks this each time, whatever the cause, and ends such a job before it runs.
"""

from __future__ import annotations

import contextlib
import os
import stat
import struct
import time
from collections.abc import Iterable, Iterator

from limosa.errors import FailedUndone, LimosaError, Reason
from limosa.image import LockedFile, Manifest
from limosa.operation.jobs import command_of
from limosa.process.identity import Handle, Identity
from limosa.process.status import tracer_of

_SHOWN = 3
_LOOKING = 5.0
"""Seconds for the machine's locks: anybody can have millions, and for each page of them the kernel begins anew."""
_DRIVERS = "/dev/nvidia"  # the driver takes its own again


def read(pids: Iterable[int]) -> list[LockedFile]:
    """Every descriptor of these processes that shows locks, with what they are and when the file was written to."""
    return [found for pid in pids for found in _of(pid)]


def _of(pid: int) -> Iterator[LockedFile]:
    for name in os.listdir(f"/proc/{pid}/fd"):
        locks = _locks(pid, int(name))
        if not locks:
            continue
        with contextlib.suppress(OSError):
            path, info = os.readlink(f"/proc/{pid}/fd/{name}"), os.stat(f"/proc/{pid}/fd/{name}")
            if not path.startswith(_DRIVERS):
                regular = stat.S_ISREG(info.st_mode) and info.st_nlink > 0
                yield LockedFile(
                    pid=pid, fd=int(name), path=path, locks=locks, modified=info.st_mtime_ns if regular else 0
                )


def _locks(pid: int, fd: int) -> list[str]:
    """The ``lock:`` lines of a descriptor's fdinfo: kind, type and range, without who and where."""
    found = []
    with contextlib.suppress(OSError), open(f"/proc/{pid}/fdinfo/{fd}", encoding="ascii", errors="replace") as file:
        for line in file:
            if line.startswith("lock:"):
                fields = line.split()
                if len(fields) >= 9:
                    found.append(" ".join((fields[2], fields[4], *fields[7:9])))
    return sorted(found)


# --- before a restore ---------------------------------------------------------------------------------------------


def in_the_way(manifest: Manifest) -> list[Reason]:
    """What stands against the job's having its locks again: somebody has them, or has written to the file since."""
    found: list[Reason] = []
    if not manifest.locks:
        return found
    files = list(_files(manifest.locks))
    wanted = _inodes(files)
    taken = [one for one in _all_locks() if one[:2] in wanted]
    for locked in files:
        try:
            info = os.stat(locked.path, follow_symlinks=False)
        except OSError:
            continue  # that it is missing is said elsewhere
        who = f"process {locked.pid} had it locked (descriptor {locked.fd})"
        for inode, device, holder, text in taken:
            if (inode, device) == (info.st_ino, info.st_dev) and any(_conflict(text, mine) for mine in locked.locks):
                command = " ".join(command_of(holder))[:80] if holder > 0 else ""
                by = f"process {holder} ({command})" if holder > 0 else "a process"
                said = f"{locked.path} is locked by {by}; {who}"
                found.append(Reason(id="file-locked", text=said, exit_code=23, hint="end it, or wait", pid=locked.pid))
                break
        else:
            if not _same_time(locked.modified, info.st_mtime_ns):
                said = f"{locked.path} was written to after the job was checkpointed, when its lock did not hold; {who}"
                found.append(_changed(said, locked.pid))
    return found


def _changed(text: str, pid: int) -> Reason:
    hint = "put the files of that time back, all that belong together; --force=locked-file-changed where the program "
    hint += "reads them anew"
    return Reason(id="locked-file-changed", text=text, exit_code=23, hint=hint, pid=pid, forceable=True)


def _files(locked: Iterable[LockedFile]) -> Iterator[LockedFile]:
    """Regular files with a name, each process's locks once."""
    seen = set()
    for entry in locked:
        key = (entry.path, entry.pid, tuple(entry.locks))
        if entry.modified and key not in seen:
            seen.add(key)
            yield entry


def _inodes(locked: Iterable[LockedFile]) -> set[tuple[int, int]]:
    """The files as the kernel's list names them: inode, device."""
    found = set()
    for entry in locked:
        with contextlib.suppress(OSError):
            info = os.stat(entry.path, follow_symlinks=False)
            found.add((info.st_ino, info.st_dev))
    return found


def _same_time(then: int, now: int) -> bool:
    """Whether a file has the time it had; archives and copies keep whole seconds only."""
    return now == then or (now % 10**9 == 0 and now // 10**9 == then // 10**9)


def _all_locks() -> Iterator[tuple[int, int, int, str]]:
    """Locks of the machine: inode, device, pid (-1 where it is nobody's), and kind, type and range.

    All of them, if they can be read in time: one that is not found here the job does not get, and is ended again.
    """
    end = time.monotonic() + _LOOKING
    with open("/proc/locks", encoding="ascii", errors="replace") as file:
        for line in file:
            if time.monotonic() > end:
                return
            fields = [field for field in line.split() if field != "->"]
            with contextlib.suppress(ValueError, IndexError):
                if "->" in line:
                    continue  # somebody who waits
                major, minor, inode = fields[5].split(":")
                device = os.makedev(int(major, 16), int(minor, 16))
                yield int(inode), device, int(fields[4]), " ".join((fields[1], fields[3], *fields[6:8]))


def _conflict(one: str, other: str) -> bool:
    """Whether two locks of one file keep each other out (fcntl(2), flock(2))."""
    kind, type_, start, end = one.split()
    kind2, type2, start2, end2 = other.split()
    ranges = {"POSIX", "OFDLCK"}
    if not (kind == kind2 == "FLOCK" or {kind, kind2} <= ranges) or "WRITE" not in (type_, type2):
        return False
    last = [2**63 if text == "EOF" else int(text) for text in (end, end2)]
    return int(start) <= last[1] and int(start2) <= last[0]


# --- while CRIU restores ------------------------------------------------------------------------------------------


def for_plugin(manifest: Manifest) -> bytes:
    """The job's POSIX locks as CRIU has them in ``filelocks.img``: what the plugin takes again; empty where none."""
    records = []
    for entry in manifest.locks:
        for text in entry.locks:
            kind, type_, start, end = text.split()
            if kind == "POSIX":
                length = 0 if end == "EOF" else int(end) + 1 - int(start)
                write = int(type_ == "WRITE")
                record = b"".join(
                    _varint(number << 3) + _varint(value)
                    for number, value in enumerate((1, write, entry.pid, entry.fd, int(start), length), 1)
                )
                records.append(struct.pack("<I", len(record)) + record)
    return struct.pack("<II", 0x54564319, 0x54323616) + b"".join(records) if records else b""


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


# --- before it runs -----------------------------------------------------------------------------------------------


def see_all_there(manifest: Manifest, criu: Identity | None) -> None:
    """Looks whether each process has the locks that it had; CRIU holds them all by ptrace and is about to let them go.

    Where one is missing, all are ended (FailedUndone): CRIU asks nobody any more, and goes on if it can.
    """
    missing = [entry for entry in manifest.locks if set(entry.locks) - set(_locks(entry.pid, entry.fd))]
    if not missing:
        return
    for process in manifest.tree:
        with contextlib.suppress(LimosaError, OSError):  # one that somebody has ended: the others are ended, too
            identity = Identity.of(process.pid)
            if criu is not None and tracer_of(process.pid) == criu.pid:
                with Handle(identity) as handle:
                    handle.signal(9)
    names = ", ".join(f"{entry.path} (process {entry.pid}: {'; '.join(entry.locks)})" for entry in missing[:_SHOWN])
    raise FailedUndone(
        what="restore",
        detail=f"locks that the job held could not be taken again: {names}",
        hint="nothing runs, the image is as it was; limosa doctor says whether Limosa's CRIU plugin is there",
    )
