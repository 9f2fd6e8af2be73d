"""The keywords of each verb, with their types: the one list for callers, ``plan`` and the command line.

A name that is left out has the default of the verb. ``checkpoint`` and ``restore`` keep theirs as a record while they
work (``dump_options.Options``, ``restore_options.Options``); a test compares names and types of both.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Literal, TypedDict

from limosa.errors import InvalidArgument, UsageError
from limosa.terms import Release

ReleaseLike = Release | Literal["all", "memory-only"]
"""What callers may say: the word, or its text."""


def release_of(said: ReleaseLike) -> Release:
    """The word for what a caller said.

    Raises:
        UsageError: there is no such word.
    """
    try:
        return Release(said)
    except ValueError:
        raise UsageError(detail=f"release={said!r}: {' or '.join(Release)}") from None


FORCEABLE = frozenset(
    [
        "cgroup",
        "criu-older",
        "disk-room",
        "driver-version",
        "host-memory",
        "jax",
        "locked-file-changed",
        "managed-memory",
        "memory-shared",
        "mount-namespace",
        "mps",
        "mps-server",
        "nccl-ranks",
        "nested-namespace",
        "peer-access",
        "pid-namespace",
        "pipe-outside",
        "pipes",
        "proc-outside",
        "pty-outside",
        "rdma",
        "resource-limits",
        "restore-descriptors",
        "runs-on",
        "socket-name",
        "socket-shared",
        "state-denied",
        "sysv-ipc",
        "user-namespace",
    ]
)
"""The refusals that ``force`` can turn into warnings (docs/refusals.md; a test compares the two)."""


def check_force(ids: Collection[str]) -> None:
    """Refuse what forces nothing: a word that is no refusal's id would otherwise be taken and do nothing.

    Raises:
        InvalidArgument: no refusal that can be forced has such an id.
    """
    if isinstance(ids, (str, bytes)):
        raise InvalidArgument(detail=f"force={ids!r}: a list of ids is needed, for example force=[{ids!r}]")
    for one in ids:
        if one not in FORCEABLE:
            can = ", ".join(sorted(FORCEABLE))
            raise InvalidArgument(
                detail=f"--force={one}: no refusal with this id can be forced; these can: {can}",
                hint="limosa plan prints --force=ID below each refusal that can be forced",
            )


class ForceOptions(TypedDict, total=False):
    """What every verb that can refuse is told.

    Attributes:
        force: ids of reasons to treat as warnings.
    """

    force: Collection[str]


class ToggleOptions(ForceOptions, total=False):
    """What ``toggle`` can be planned with.

    Attributes:
        max_pause: seconds a job may stand still; refused beforehand by estimate.
    """

    max_pause: float | None


class SuspendOptions(ToggleOptions, total=False):
    """What ``suspend`` can be planned with.

    Attributes:
        release: "all", or "memory-only": the job's context stays on its GPU.
    """

    release: ReleaseLike


class WhereOptions(TypedDict, total=False):
    """Where a job is to go.

    Attributes:
        to: the destination GPU: index, UUID or PCI bus id.
        source: the GPU to clear, where a job is on several.
        gpu_map: instead of ``to``: what changes, "0=1,1=0" or a mapping.
    """

    to: str | None
    source: str | None
    gpu_map: str | Mapping[str, str] | None


class MoveOptions(ToggleOptions, WhereOptions, total=False):
    """What ``move`` and ``resume`` can be planned with."""


class CriuOptions(ForceOptions, total=False):
    """What ``checkpoint`` and ``restore`` have in common; names as CRIU and podman have them.

    Attributes:
        tcp_established: connected TCP sockets stay connected.
        tcp_close: connected TCP sockets come back closed.
        shell_job: the job is attached to a terminal.
        file_locks: dump file locks.
        criu: CRIU's path.
        print_stats: fill in the result's ``stats``.
    """

    tcp_established: bool
    tcp_close: bool
    shell_job: bool
    file_locks: bool
    criu: str | None
    print_stats: bool


class CheckpointOptions(CriuOptions, total=False):
    """What ``checkpoint`` can be told; see :class:`limosa.operation.dump_options.Options` for what each does."""

    leave_running: bool
    ghost_limit: int | None
    link_remap: bool
    skip_in_flight: bool
    ext_unix_sk: bool
    rate: float | None
    rounds: int | None
    chunk_bytes: int
    max_pause: float | None


class PlanCheckpointOptions(CheckpointOptions):
    """What planning a ``checkpoint`` is told: the folder as well.

    Attributes:
        output: the image's folder.
    """

    output: str | os.PathLike[str]


class RestoreOptions(CriuOptions, WhereOptions, total=False):
    """What ``restore`` can be told; see :class:`limosa.operation.restore_options.Options` for what each does."""

    verify: bool
    rewind_files: bool
    cgroup: str | None
    adopt: bool


class PlanOptions(CheckpointOptions, SuspendOptions, WhereOptions, total=False):
    """What planning some verb can be told; each verb takes its own of these."""

    output: str | os.PathLike[str]
