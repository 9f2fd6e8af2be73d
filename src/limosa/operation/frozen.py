"""What a manifest says of a job, read while CRIU holds it frozen: its processes and its open files."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Collection
from pathlib import Path

from limosa.errors import LimosaError
from limosa.image import OpenFile, TreeProcess
from limosa.operation.jobs import command_of
from limosa.operation.prepare import Prepared
from limosa.process import hazards
from limosa.process.descriptors import ANONYMOUS_SHARED, read_mounts
from limosa.process.identity import read_stat

_DRIVERS = "/dev/nvidia"  # what the driver has mapped there it has let go since: no restore needs it


def tree_and_files(prepared: Prepared, lent: Collection[str] = ()) -> tuple[list[TreeProcess], list[OpenFile]]:
    """The frozen tree's processes and its regular files: sizes, and positions in those open for writing.

    Read while nothing moves. Which files are mapped is taken from the plan's observation (reading thousands of mappings
    would be paid for by the pause), their sizes are read now. ``lent``: names that files have for CRIU alone.
    """
    cuda = {m.pid: m for m in prepared.members}
    late = hazards.late_ranks(prepared.observation, cuda) if prepared.observation else []
    to_come = {process.pid for process in late}
    tree, files = [], []
    for identity in prepared.tree:
        member = cuda.get(identity.pid)
        with contextlib.suppress(LimosaError, OSError):
            tree.append(
                TreeProcess(
                    pid=identity.pid,
                    ppid=read_stat(identity.pid).ppid,
                    start_time=identity.start_time,
                    command=command_of(identity.pid),
                    cuda=member is not None,
                    threads=sorted(int(t) for t in os.listdir(f"/proc/{identity.pid}/task") if t != str(identity.pid)),
                    openable=list(member.home) if member else [],
                    held=member.held if member else {},
                    rank_to_come=identity.pid in to_come,
                )
            )
            files += _open_files(identity.pid, lent)
    seen = {(f.path, f.inode) for f in files}
    for process in prepared.observation.processes if prepared.observation else []:
        for m in process.maps:
            if m.path.startswith(_DRIVERS) or not m.path.startswith("/"):
                continue
            if m.inode and not m.deleted and (m.path, m.inode) not in seen:
                seen.add((m.path, m.inode))
                with contextlib.suppress(OSError):
                    info = os.stat(m.path)
                    if stat.S_ISREG(info.st_mode) and info.st_ino == m.inode:
                        files.append(
                            OpenFile(
                                path=m.path,
                                size=info.st_size,
                                pid=process.pid,
                                mapped=True,
                                inode=m.inode,
                                mode=info.st_mode,
                            )
                        )
    return tree, files


def shared_outside(prepared: Prepared) -> set[int]:
    """The inodes of the named shared memory that the job has mapped together with processes outside of it."""
    processes = prepared.observation.processes if prepared.observation else []
    return {m.inode for process in processes for m in process.maps if m.peers and m.named_shm}


def _open_files(pid: int, lent: Collection[str]) -> list[OpenFile]:
    found = []
    mounts = read_mounts(f"/proc/{pid}")
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError, ValueError):
            info = os.stat(f"/proc/{pid}/fd/{name}")
            target = os.readlink(f"/proc/{pid}/fd/{name}")
            if not stat.S_ISREG(info.st_mode) or not target.startswith("/"):
                continue
            if target.startswith("/memfd:") or target == ANONYMOUS_SHARED:
                continue
            lines = Path(f"/proc/{pid}/fdinfo/{name}").read_text().splitlines()
            fields = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
            mount = mounts.get(int(fields["mnt_id"]))
            if mount is not None and mount.inside(target)[:1].isdigit():
                continue  # /proc/PID/…: it comes and goes with its process
            flags = int(fields["flags"], 8)
            writes = flags & os.O_ACCMODE != os.O_RDONLY
            deleted = info.st_nlink == 0
            if target.endswith(" (deleted)") and not deleted and (target in lent or not os.path.lexists(target)):
                continue  # it has another name: a semaphore, or CRIU's --link-remap
            found.append(
                OpenFile(
                    path=target.removesuffix(" (deleted)") if deleted else target,
                    size=info.st_size,
                    pid=pid,
                    fd=int(name),
                    flags=flags,
                    position=int(fields["pos"]) if writes else None,
                    deleted=deleted,
                    inode=info.st_ino,
                    mode=info.st_mode,
                )
            )
    return found
