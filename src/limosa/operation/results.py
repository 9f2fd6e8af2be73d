"""What operations return: typed results that the command line prints as JSON field by field (``docs/json.md``)."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from limosa.errors import LimosaError, Reason
from limosa.terms import Route, Verdict


class Estimate(msgspec.Struct, kw_only=True):
    """What an operation is expected to cost.

    Attributes:
        pause_seconds: how long the job will stand still; None where the job does not go on afterwards.
        seconds: the whole operation.
        bytes: what must be copied (device memory, and host memory where an image is written).
    """

    pause_seconds: float | None = None
    seconds: float = 0.0
    bytes: int = 0


class OtherWay(msgspec.Struct, kw_only=True):
    """What an operation would have cost by the way that is not taken, by estimate.

    Attributes:
        way: "driver", or "parked" for a job that was not started by ``limosa run``.
        pause_seconds, seconds: as in :class:`Estimate`.
    """

    way: Route
    pause_seconds: float | None = None
    seconds: float = 0.0


class Plan(msgspec.Struct, kw_only=True):
    """What an operation would do to one job, and whether it would.

    Attributes:
        operation: "move", "suspend", "resume", "toggle", "checkpoint" or "restore".
        pid: the job's root process (for restore: the pid it will have).
        verdict: "ok" or "refused".
        reasons: refusals first, then warnings.
        steps: the steps in their order, in words.
        map: what each GPU (by UUID) becomes, full permutation; empty for jobs without CUDA state.
        gpus: UUIDs of the GPUs that the job would have memory on afterwards.
        way: how the job's state is held: "driver", "parked" or "host" (no CUDA state: CRIU alone).
        other: what the other way would cost, where there is another.
        already: nothing would have to be done.
    """

    operation: str
    pid: int
    name: str = ""
    verdict: Verdict = Verdict.OK
    reasons: list[Reason] = []
    steps: list[str] = []
    estimate: Estimate = msgspec.field(default_factory=Estimate)
    map: dict[str, str] = {}
    gpus: list[str] = []
    way: Route = Route.DRIVER
    other: OtherWay | None = None
    already: bool = False

    @property
    def exit_code(self) -> int:
        """0, or the first refusal's exit code."""
        return next((r.exit_code for r in self.reasons if r.refuses), 0)


class JobResult(msgspec.Struct, kw_only=True):
    """What ``move``, ``suspend``, ``resume`` or ``toggle`` did to one job.

    Attributes:
        state: the job's state now: "running", "checkpointed" (suspended) or "parked" (its memory alone is suspended).
        map: GPU UUID → GPU UUID, the full map that was used; empty where nothing was restored.
        gpus: UUIDs of the GPUs that the job has memory on now; none where it is suspended.
        timings: seconds for each step ("plan", "lock", "checkpoint", "restore", "unlock", "total") and
            "pause_seconds", as the job felt it (for suspend: how long it took to stand still).
        bytes: device memory that was moved.
        already: True where nothing had to be done.
        way: "driver", or "parked" where what the shim looks after was held aside; "" where nothing had to be done.
        other: what the other way would have cost, by estimate.
        release: of a suspend: what was given back, "all" or "memory-only".
    """

    operation: str
    pid: int
    name: str = ""
    state: str = "running"
    map: dict[str, str] = {}
    gpus: list[str] = []
    timings: dict[str, float] = {}
    bytes: int = 0
    already: bool = False
    way: Route | Literal[""] = Route.DRIVER
    other: OtherWay | None = None
    release: str = ""
    warnings: list[Reason] = []


class Round(msgspec.Struct, kw_only=True):
    """One round of copying device memory into an image.

    Attributes:
        chunks, bytes, seconds: what was copied, and how long it took.
        hash_seconds: how long the GPUs hashed before, to find what had changed (in the pause: a part of ``seconds``).
        in_pause: whether the job stood still.
    """

    chunks: int = 0
    bytes: int = 0
    seconds: float = 0.0
    hash_seconds: float = 0.0
    in_pause: bool = False


class CheckpointResult(msgspec.Struct, kw_only=True):
    """What ``checkpoint`` wrote.

    Attributes:
        image: the folder's absolute path.
        id: the image's id, the BLAKE3 of its manifest (hex).
        bytes: size of all files in the image.
        left_running: whether the job runs on.
        timings: seconds per step and "pause_seconds" (absent where the job was ended).
        unreaped: pids that had ended and whose parent had not reaped them after 10 s, with that parent's pid.
        stats: CRIU's own statistics (``--print-stats``).
        way: "parked" where device memory went into the image as chunks, "driver", or "host" (no CUDA state).
        other: what the other way would have cost, by estimate.
        device_bytes: device memory that is in the image as chunks.
        rounds: how it was copied there.
        was_suspended: whether the job was suspended before.
        removed: of a container that was ended, what is gone: its name, and the file that its runtime logged to.
    """

    image: str
    id: str
    bytes: int
    pid: int
    name: str = ""
    way: Route = Route.DRIVER
    other: OtherWay | None = None
    device_bytes: int = 0
    rounds: list[Round] = []
    left_running: bool = False
    was_suspended: bool = False
    removed: list[str] = []
    state: str = "ended"
    timings: dict[str, float] = {}
    warnings: list[Reason] = []
    unreaped: dict[int, int] = {}
    stats: dict[str, Any] = {}
    operation: str = "checkpoint"


class RestoreResult(msgspec.Struct, kw_only=True):
    """What ``restore`` brought back.

    Attributes:
        pid: the job's root process.
        id: the image's id.
        map: GPU UUID (in the image) → GPU UUID (here).
        gpus: UUIDs of the GPUs that the job has memory on.
        log: the job's log file where it was started by ``limosa run``, else "".
        way: "parked" where device memory was in the image as chunks, "driver", or "host" (no CUDA state).
        other: what the other way would have cost, by estimate.
        device_bytes: device memory that was in the image as chunks.
    """

    pid: int
    id: str
    image: str = ""
    name: str = ""
    log: str = ""
    way: Route = Route.DRIVER
    other: OtherWay | None = None
    device_bytes: int = 0
    map: dict[str, str] = {}
    gpus: list[str] = []
    timings: dict[str, float] = {}
    warnings: list[Reason] = []
    stats: dict[str, Any] = {}
    operation: str = "restore"


class WaitResult(msgspec.Struct, kw_only=True):
    """How a job ended that was waited for.

    Attributes:
        exit_code: its topmost process's, 128 + the signal that ended it; None where nobody can know, and where a
            checkpoint ended it.
        ended: when, RFC 3339.
        image: the image, where a checkpoint ended it, else "".
    """

    pid: int
    name: str = ""
    exit_code: int | None = None
    ended: str = ""
    image: str = ""


class StopResult(msgspec.Struct, kw_only=True):
    """What ``stop`` did.

    Attributes:
        exit_code: as in :class:`WaitResult`.
        killed: processes that did not end by themselves and were sent SIGKILL.
        seconds: how long it took.
    """

    pid: int
    name: str = ""
    exit_code: int | None = None
    killed: list[int] = []
    seconds: float = 0.0
    operation: str = "stop"


class Recovered(msgspec.Struct, kw_only=True):
    """What ``recover`` did about one thing that a dead operation left.

    Attributes:
        kind: "operation" (a journal), "folder" (an unfinished image), "record" (a stale claim).
        did: what was done, in words ("brought process 4711 back to running").
        state: the job's state now, or "".
        error: why it could not be done, or "".
        exit_code: 0, 40 or 41; for a folder also what kept it from being removed (11, 19).
        user: whose own matter it is, where it is another user's than the caller's: 19 where he is not done with it.
    """

    kind: str
    user: str = ""
    id: str = ""
    operation: str = ""
    pid: int = 0
    state: str = ""
    image: str = ""
    did: str = ""
    error: str = ""
    exit_code: int = 0


class Ps(msgspec.Struct, kw_only=True):
    """One job as ``ps`` shows it.

    Attributes:
        state: "running", "locked", "checkpointed" (suspended), "parked" (only its memory is), "failed", "mixed",
            "unknown", or the driver's number as text.
        gpus: one entry for each GPU on which it holds memory: index, uuid, memory_used (bytes). For a suspended job the
            GPU it came from and the bytes it had there.
        processes: one entry for each process of the tree: pid, command, state ("" without CUDA state), memory_used;
            with CUDA state also way, why, parkable, left, calls, unknown (:class:`limosa.operation.ways.Way`), and
            ranks: communicator (hex), rank, ranks (how many it has), gpu (index, or -1) of each rank of NCCL's in it.
        communicators: how many communicators of NCCL's there are between its processes (between), and whether Limosa
            has closed them and not made them again yet (closed); None where there are none, or nobody could be asked.
        way: "parked" where all of its processes with CUDA state are under the shim, "driver", or "" without CUDA state.
        parkable: bytes that can be parked.
        movable: whether ``plan move`` finds nothing against it.
        reasons: refusals and warnings.
        suspended: since (RFC 3339), by (user), release ("all" or "memory-only"), or None.
        container: the container that it is in (runtime, id, name, pod, namespace: "" what is not known), or None.
        under_way: the operation that works on it (operation), and whether that lives (alive): else ``recover`` is what
            it waits for; or None.
    """

    pid: int
    name: str = ""
    user: str = ""
    command: list[str] = []
    state: str = "running"
    gpus: list[dict[str, Any]] = []
    processes: list[dict[str, Any]] = []
    communicators: dict[str, Any] | None = None
    movable: bool = True
    reasons: list[Reason] = []
    suspended: dict[str, Any] | None = None
    container: dict[str, str] | None = None
    under_way: dict[str, Any] | None = None
    started_by_run: bool = False
    way: str = ""
    parkable: int = 0


class Outcome(msgspec.Struct, kw_only=True):
    """One job's part of an operation on several: a result or an error."""

    pid: int
    name: str = ""  # of one that failed, if it has one
    result: JobResult | None = None
    error: LimosaError | None = None
    plan: Plan | None = None
