"""What operations return: typed results that the command line prints as JSON field by field (``docs/json.md``)."""

from __future__ import annotations

from typing import Any

import msgspec

from limosa.errors import LimosaError, Reason
from limosa.terms import Route, Verdict


class Estimate(msgspec.Struct, kw_only=True):
    """What an operation is expected to cost."""

    # how long the job will stand still; None where the job does not go on afterwards
    pause_seconds: float | None = None
    seconds: float = 0.0  # the whole operation
    bytes: int = 0  # what must be copied (device memory, and host memory where an image is written)


class OtherWay(msgspec.Struct, kw_only=True):
    """What an operation would have cost by the way that is not taken, by estimate."""

    way: Route  # "driver", or "parked" for a job that was not started by ``limosa run``
    pause_seconds: float | None = None  # this and the next as in :class:`Estimate`
    seconds: float = 0.0


class Plan(msgspec.Struct, kw_only=True):
    """What an operation would do to one job, and whether it would."""

    operation: str  # "move", "suspend", "resume", "toggle", "checkpoint" or "restore"
    pid: int  # the job's root process (for restore: the pid it will have)
    name: str = ""
    verdict: Verdict = Verdict.OK  # "ok" or "refused"
    reasons: list[Reason] = []  # refusals first, then warnings
    steps: list[str] = []  # the steps in their order, in words
    estimate: Estimate = msgspec.field(default_factory=Estimate)
    map: dict[str, str] = {}  # what each GPU (by UUID) becomes, full permutation; empty for jobs without CUDA state
    gpus: list[str] = []  # UUIDs of the GPUs that the job would have memory on afterwards
    way: Route = Route.DRIVER  # how the job's state is held: "driver", "parked" or "host" (no CUDA state: CRIU alone)
    other: OtherWay | None = None  # what the other way would cost, where there is another
    already: bool = False  # nothing would have to be done

    @property
    def exit_code(self) -> int:
        """0, or the first refusal's exit code."""
        return next((r.exit_code for r in self.reasons if r.refuses), 0)


class JobResult(msgspec.Struct, kw_only=True):
    """What ``move``, ``suspend``, ``resume`` or ``toggle`` did to one job."""

    operation: str
    pid: int
    name: str = ""
    # the job's state now: "running", "checkpointed" (suspended) or "parked" (its memory alone is suspended)
    state: str = "running"
    map: dict[str, str] = {}  # GPU UUID → GPU UUID, the full map that was used; empty where nothing was restored
    gpus: list[str] = []  # UUIDs of the GPUs that the job has memory on now; none where it is suspended
    # seconds for each step ("plan", "lock", "checkpoint", "restore", "unlock", "total") and "pause_seconds", as the job
    # felt it (for suspend: how long it took to stand still)
    timings: dict[str, float] = {}
    bytes: int = 0  # device memory that was moved
    already: bool = False  # True where nothing had to be done
    way: Route = Route.DRIVER  # "driver", or "parked" where what the shim looks after was held aside
    other: OtherWay | None = None  # what the other way would have cost, by estimate
    release: str = ""  # of a suspend: what was given back, "all" or "memory-only"
    warnings: list[Reason] = []


class Round(msgspec.Struct, kw_only=True):
    """One round of copying device memory into an image."""

    chunks: int = 0  # this and the next two: what was copied, and how long it took
    bytes: int = 0
    seconds: float = 0.0
    hash_seconds: float = 0.0  # how long the GPUs looked for what had changed (in the pause: a part of ``seconds``)
    in_pause: bool = False  # whether the job stood still


class CheckpointResult(msgspec.Struct, kw_only=True):
    """What ``checkpoint`` wrote."""

    image: str  # the folder's absolute path
    id: str  # the image's id, the BLAKE3 of its manifest (hex)
    bytes: int  # size of all files in the image
    pid: int
    name: str = ""
    # "parked" where device memory went into the image as chunks, "driver", or "host" (no CUDA state)
    way: Route = Route.DRIVER
    other: OtherWay | None = None  # what the other way would have cost, by estimate
    device_bytes: int = 0  # device memory that is in the image as chunks
    rounds: list[Round] = []  # how it was copied there
    left_running: bool = False  # whether the job runs on
    state: str = "ended"
    timings: dict[str, float] = {}  # seconds per step and "pause_seconds" (absent where the job was ended)
    warnings: list[Reason] = []
    # pids that had ended and whose parent had not reaped them after 10 s, with that parent's pid
    unreaped: dict[int, int] = {}
    stats: dict[str, Any] = {}  # CRIU's own statistics (``--print-stats``)
    operation: str = "checkpoint"


class RestoreResult(msgspec.Struct, kw_only=True):
    """What ``restore`` brought back."""

    pid: int  # the job's root process
    id: str  # the image's id
    image: str = ""
    name: str = ""
    log: str = ""  # the job's log file where it was started by ``limosa run``, else ""
    # "parked" where device memory was in the image as chunks, "driver", or "host" (no CUDA state)
    way: Route = Route.DRIVER
    other: OtherWay | None = None  # what the other way would have cost, by estimate
    device_bytes: int = 0  # device memory that was in the image as chunks
    map: dict[str, str] = {}  # GPU UUID (in the image) → GPU UUID (here)
    gpus: list[str] = []  # UUIDs of the GPUs that the job has memory on
    timings: dict[str, float] = {}
    warnings: list[Reason] = []
    stats: dict[str, Any] = {}
    operation: str = "restore"


class WaitResult(msgspec.Struct, kw_only=True):
    """How a job ended that was waited for."""

    pid: int
    name: str = ""
    # its topmost process's, 128 + the signal that ended it; None where nobody can know, or a checkpoint ended it
    exit_code: int | None = None
    ended: str = ""  # when, RFC 3339
    image: str = ""  # the image, where a checkpoint ended it, else ""


class StopResult(msgspec.Struct, kw_only=True):
    """What ``stop`` did."""

    pid: int
    name: str = ""
    exit_code: int | None = None  # as in :class:`WaitResult`
    killed: list[int] = []  # processes that did not end by themselves and were sent SIGKILL
    seconds: float = 0.0  # how long it took
    operation: str = "stop"


class Recovered(msgspec.Struct, kw_only=True):
    """What ``recover`` did about one thing that a dead operation left."""

    kind: str  # "operation" (a journal), "folder" (an unfinished image), "record" (a stale claim)
    # whose own matter it is, where it is another user's than the caller's: 19 where he is not done with it
    user: str = ""
    id: str = ""
    operation: str = ""
    pid: int = 0
    state: str = ""  # the job's state now, or ""
    image: str = ""
    did: str = ""  # what was done, in words ("brought process 4711 back to running")
    error: str = ""  # why it could not be done, or ""
    exit_code: int = 0  # 0, 40 or 41; for a folder also what kept it from being removed (11, 19)


class Ps(msgspec.Struct, kw_only=True):
    """One job as ``ps`` shows it."""

    pid: int
    name: str = ""
    user: str = ""
    command: list[str] = []
    # "running", "locked", "checkpointed" (suspended), "parked" (only its memory is), "failed", "mixed", "unknown", or
    # the driver's number as text
    state: str = "running"
    # one entry for each GPU on which it holds memory: index, uuid, memory_used (bytes). For a suspended job the GPU it
    # came from and the bytes it had there.
    gpus: list[dict[str, Any]] = []
    # one entry for each process of the tree: pid, command, state ("" without CUDA state), memory_used; with CUDA state
    # also way, why, parkable, left, calls, unknown (:class:`limosa.operation.ways.Way`)
    processes: list[dict[str, Any]] = []
    movable: bool = True  # whether ``plan move`` finds nothing against it
    reasons: list[Reason] = []  # refusals and warnings
    suspended: dict[str, Any] | None = None  # since (RFC 3339), by (user), release ("all" or "memory-only"), or None
    # the operation that works on it (operation), and whether that lives (alive): else ``recover`` is what it waits for;
    # or None
    under_way: dict[str, Any] | None = None
    started_by_run: bool = False
    # "parked" where all of its processes with CUDA state are under the shim, "driver", or "" without CUDA state
    way: str = ""
    parkable: int = 0  # bytes that can be parked


class Outcome(msgspec.Struct, kw_only=True):
    """One job's part of an operation on several: a result or an error."""

    pid: int
    result: JobResult | None = None
    error: LimosaError | None = None
    plan: Plan | None = None
