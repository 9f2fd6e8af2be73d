"""The options of ``restore``, and what a look at the image has found."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping

import msgspec

from limosa import gpu
from limosa.errors import Reason
from limosa.image import Manifest
from limosa.operation.estimate import device_bytes
from limosa.operation.journal import Member
from limosa.operation.options import check_force
from limosa.operation.rewind import Rewind
from limosa.operation.step import Shape
from limosa.process.criu.program import Criu


class Options(msgspec.Struct, kw_only=True, frozen=True):
    """What ``restore`` can be told."""

    to: str | None = None  # this and the next two as for ``move``; GPUs on the left are the image's
    source: str | None = None
    gpu_map: str | Mapping[str, str] | None = None
    verify: bool = True  # check every hash first
    # cut files that have grown since back to the size they had, keeping the tail beside them
    rewind_files: bool = False
    name: str | None = None  # what a container is to be called; None: as it was
    bundle: str | None = None  # of runc: the bundle of a container; None: the one that it had
    # of runc: the file that a container's output is appended to; None: nowhere
    log: str | os.PathLike[str] | None = None
    publish: Collection[str] = ()  # of podman: ports of the machine for a container, "8081:80"; none: those that it had
    cgroup: str | None = None  # control group for the job; None for the caller's
    # this and the next three as CRIU's; what the image was made with is taken by itself
    tcp_established: bool = False
    tcp_close: bool = False
    shell_job: bool = False
    file_locks: bool = False
    criu: str | None = None  # CRIU's path
    adopt: bool = False  # become the restored process's parent (to follow it)
    print_stats: bool = False  # fill in the result's ``stats``
    force: Collection[str] = ()  # ids of reasons to treat as warnings

    def __post_init__(self) -> None:
        check_force(self.force)


class ImageFacts(msgspec.Struct, kw_only=True):
    """What is so of an image, and here: gathered before anything is started."""

    manifest: Manifest
    members: list[Member] = []
    inventory: gpu.Inventory | None = None
    reasons: list[Reason] = []
    rewind: list[Rewind] = []
    program: Criu | None = None


def shape_of(facts: ImageFacts, manifest: Manifest, options: Options) -> Shape:
    """What the words and the cost of its steps depend on.

    What the driver brings back is a part of what the image has of host memory, and is counted apart.
    """
    host_bytes = manifest.host_bytes - (device_bytes(facts.members) - manifest.device_bytes)
    return Shape(
        members=facts.members,
        parked=manifest.device_bytes,
        host_bytes=max(0, host_bytes),
        processes=len(manifest.tree),
        files=[(r.path, r.size) for r in facts.rewind],
        verify=options.verify,
        container=called_back(manifest, options) if manifest.container is not None else "",
    )


def called_back(manifest: Manifest, options: Options) -> str:
    """What the job will be called."""
    box = manifest.container
    if box is None:
        return manifest.job.name
    return f"{box.runtime}:{options.name if options.name is not None else box.name}"
