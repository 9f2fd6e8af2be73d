"""The keywords of each verb, with their types: the one list for callers, ``plan`` and the command line.

A name that is left out has the default of the verb. ``checkpoint`` and ``restore`` keep theirs as a record while they
work (``dump_options.Options``, ``restore_options.Options``); a test compares names and types of both.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Literal, TypedDict

from limosa.errors import InvalidArgument, UsageError
from limosa.terms import Release

if TYPE_CHECKING:
    import threading

    from limosa import gpu
    from limosa.progress import ProgressFn

ReleaseLike = Release | Literal["all", "memory-only"]
"""What callers may say: the word, or its text."""


def release_of(said: ReleaseLike) -> Release:
    """The word for what a caller said; UsageError: there is none."""
    try:
        return Release(said)
    except ValueError:
        raise UsageError(detail=f"release={said!r}: {' or '.join(Release)}") from None


FORCEABLE = frozenset(
    [
        "cgroup",
        "clone-shares",
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
        "multicast",
        "nccl-newer",
        "nccl-ranks",
        "nccl-beside",
        "rank-to-come",
        "nested-namespace",
        "peer-access",
        "pid-namespace",
        "pipe-outside",
        "pod-devices",
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
            meant = difflib.get_close_matches(one, sorted(FORCEABLE), n=1)
            raise InvalidArgument(
                detail=f"--force={one}: no refusal with this id can be forced" + "".join(f" ({m} can)" for m in meant),
                hint="limosa plan prints --force=ID below each refusal that can be forced",
            )


def check_seconds(**seconds: object) -> None:
    """Refuses what is no time, by its name; None is no limit.

    Raises:
        InvalidArgument: it is no number, or negative.
    """
    for name, value in seconds.items():
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
            raise InvalidArgument(detail=f"{name}={value!r} is not a number of seconds")


def check_names(function: str, given: Collection[str], known: Collection[str]) -> None:
    """Refuses a keyword that a function does not have, by the function's name, as Python does.

    Raises:
        TypeError: there is one.
    """
    for name in given:
        if name not in known:
            raise TypeError(f"limosa.{function}() got an unexpected keyword argument {name!r}")


class ForceOptions(TypedDict, total=False):
    """What every verb that can refuse is told."""

    force: Collection[str]  # ids of reasons to treat as warnings


class ToggleOptions(ForceOptions, total=False):
    """What ``toggle`` can be planned with."""

    max_pause: float | None  # seconds a job may stand still; refused beforehand by estimate


class SuspendOptions(ToggleOptions, total=False):
    """What ``suspend`` can be planned with."""

    release: ReleaseLike  # "all", or "memory-only": the job's context stays on its GPU


class WhereOptions(TypedDict, total=False):
    """Where a job is to go."""

    to: str | None  # the destination GPU: index, UUID or PCI bus id
    source: str | None  # the GPU to clear, where a job is on several
    gpu_map: str | Mapping[str, str] | None  # instead of ``to``: what changes, "0=1,1=0" or a mapping


class MoveOptions(ToggleOptions, WhereOptions, total=False):
    """What ``move`` and ``resume`` can be planned with."""


class DoingOptions(TypedDict, total=False):
    """How ``move``, ``suspend``, ``resume`` and ``toggle`` are to do it."""

    max_pause: float | None  # seconds a job may stand still; refused beforehand by estimate
    dry_run: bool  # only plan; outcomes carry plans
    timeout: float | None  # seconds for each job; then everything is undone
    progress: ProgressFn  # told of steps and bytes
    cancel: threading.Event | None  # set it to stop and undo
    driver: gpu.Driver | None  # a client of the driver's worker that the caller has and closes; None: one for this call
    one_by_one: bool  # of several jobs the next is begun when the one before is done


class CriuOptions(ForceOptions, total=False):
    """What ``checkpoint`` and ``restore`` have in common; names as CRIU and podman have them."""

    tcp_established: bool  # connected TCP sockets stay connected
    tcp_close: bool  # connected TCP sockets come back closed
    shell_job: bool  # the job is attached to a terminal
    file_locks: bool  # dump file locks
    criu: str | None  # CRIU's path
    print_stats: bool  # fill in the result's ``stats``


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
    """What planning a ``checkpoint`` is told: the folder as well."""

    output: str | os.PathLike[str]  # the image's folder


class RestoreOptions(CriuOptions, WhereOptions, total=False):
    """What ``restore`` can be told; see :class:`limosa.operation.restore_options.Options` for what each does."""

    verify: bool
    rewind_files: bool
    name: str | None
    bundle: str | None
    publish: Collection[str]
    log: str | os.PathLike[str] | None
    cgroup: str | None
    adopt: bool


class PlanOptions(CheckpointOptions, SuspendOptions, WhereOptions, total=False):
    """What planning some verb can be told; each verb takes its own of these."""

    output: str | os.PathLike[str]
