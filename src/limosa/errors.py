"""Every error there is: a class, a message template, fields, a stable id and a stable exit code.

The exit code tells what state the job is in (``docs/exit-codes.md``): from 2 to 39 the job is as it was.
Library code raises these and never prints or exits; the command line turns one into a sentence or into JSON.

Examples:
    >>> str(NoSuchProcess(pid=4711))
    'there is no process 4711'
    >>> NoSuchProcess(pid=4711).exit_code
    10
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec


class Reason(msgspec.Struct, frozen=True, kw_only=True):
    """One finding of ``plan``: a refusal, or a warning where ``exit_code`` is 0.

    Attributes:
        id: stable, short, lower case with dashes ("cgroup"); what ``--force=ID`` takes.
        text: what was found, in a sentence that names pids, descriptors, GPUs, bytes.
        exit_code: what a refusal exits with (design: 2..39); 0 makes it a warning.
        hint: the way out, or "".
        pid: the process it was found on, or 0.
        forceable: whether ``--force=ID`` may turn it into a warning.
    """

    id: str
    text: str
    exit_code: int = 0
    hint: str = ""
    pid: int = 0
    forceable: bool = False

    @property
    def refuses(self) -> bool:
        """True where this finding forbids the operation."""
        return self.exit_code != 0

    def as_warning(self) -> Reason:
        """The same finding as a warning (what ``--force=ID`` does)."""
        return msgspec.structs.replace(self, exit_code=0)


class LimosaError(Exception):
    """The base of every error; also the internal error (exit code 1).

    Keyword arguments fill the class's ``template`` and are kept in ``fields``.

    Args:
        message: used instead of the template where given.
        hint: the command to type or the thing to change next; overrides the class's ``hint_template``.
        job_state: "running", "locked", "checkpointed", "mixed", "gone", "unknown" or "".
        **fields: what the template names; also kept for programs.
    """

    id: ClassVar[str] = "internal"
    exit_code: ClassVar[int] = 1
    template: ClassVar[str] = "internal error: {detail}"
    hint_template: ClassVar[str] = ""

    def __init__(self, message: str | None = None, *, hint: str | None = None, job_state: str = "", **fields: Any):
        self.fields: dict[str, Any] = fields
        self.message = message if message is not None else self.template.format(**fields)
        self.hint = hint if hint is not None else self.hint_template.format(**fields)
        self.job_state = job_state
        self.warnings: list[Reason] = []
        super().__init__(self.message)


# --- 2: usage ------------------------------------------------------------------------------------------------


class UsageError(LimosaError):
    """What was asked makes no sense: an option, a GPU name, a map."""

    id, exit_code, template = "usage", 2, "{detail}"


class InvalidArgument(UsageError, ValueError, TypeError):
    """A pid, time-out or name of the wrong kind or range. It is also a ``ValueError`` and a ``TypeError``."""

    id = "invalid-argument"


class InvalidMap(UsageError):
    """A GPU map that cannot be: two sources on one GPU, an unknown GPU, one the job cannot open."""

    id = "invalid-map"


class WrongChip(InvalidMap):
    """A map between GPUs of different chips, which the driver cannot restore."""

    id, exit_code = "chip", 12
    hint_template = "limosa gpus shows which are alike"


class UnknownGpu(UsageError):
    """No GPU of this machine has that name."""

    id, template = "unknown-gpu", "no GPU of this machine is called {spec!r}"
    hint_template = "limosa gpus lists them"


class OwnAncestor(UsageError):
    """Limosa was asked to work on itself or on the shell (or job) that it was started from."""

    id, template = "own-ancestor", "process {pid} is what limosa was started from: stopping it would stop limosa"
    hint_template = "run limosa from another terminal, outside of that job"


# --- 10, 11, 19, 20: who -------------------------------------------------------------------------------------


class NoSuchProcess(LimosaError):
    """The process does not exist, or has ended by itself."""

    id, exit_code, template = "no-such-process", 10, "there is no process {pid}"
    hint_template = "limosa ps lists the jobs"


class NotAProcess(NoSuchProcess):
    """The number is a thread's id."""

    id, template = "not-a-process", "{pid} is a thread of process {tgid}, not a process"
    hint_template = "name process {tgid}"


class Zombie(NoSuchProcess):
    """The process has ended and waits to be reaped."""

    id, template = "zombie", "process {pid} has ended (a zombie; its parent {ppid} has not reaped it)"


class PermissionDenied(LimosaError):
    """Not allowed to look at or act on the process, the file or the image."""

    id, exit_code, template = "permission", 11, "not permitted: {detail}"


class UntrustedImage(PermissionDenied):
    """Root was asked to restore an image that somebody else could have written."""

    id, template = "untrusted-image", "image {path} is not trusted: {detail}"


class Busy(LimosaError):
    """Another operation works on the same job, or holds what this one needs."""

    id, exit_code, template = "busy", 19, "process {pid} is being worked on by {by}"
    hint_template = "wait until that has ended; if it has died, type: limosa recover"


class PidReused(LimosaError):
    """The pid now belongs to another process than the one that was planned for."""

    id, exit_code, template = "pid-reused", 20, "pid {pid} now belongs to a different process"


# --- 12..15: what and where ----------------------------------------------------------------------------------


class GpuUnavailable(LimosaError):
    """The GPU or driver cannot do what is asked. ``BindingsTooOld``, ``DriverTooOld`` and ``SymbolMissing`` say why."""

    id, exit_code, template = "gpu-unavailable", 12, "{detail}"
    hint_template = "limosa doctor says what is missing"


class BindingsTooOld(GpuUnavailable):
    """cuda.bindings lacks the checkpoint functions."""

    id = "bindings-too-old"


class SymbolMissing(GpuUnavailable):
    """libcuda is there and lacks the function."""

    id = "symbol-missing"


class DriverTooOld(GpuUnavailable):
    """There is no NVIDIA driver, or it is older than what is asked needs."""

    id = "driver-too-old"


class NoLibrary(LimosaError):
    """A library or program of Limosa's own was not compiled, or others can change it."""

    id, exit_code = "no-library", 12
    template = "{detail}"
    hint_template = "limosa doctor --fix"


class CannotBeMoved(LimosaError):
    """The job uses something that cannot be moved."""

    id, exit_code, template = "cannot-be-moved", 13, "{detail}"


class NoRoomOnGpu(LimosaError):
    """The target GPU has too little free memory."""

    id, exit_code, template = "no-room-on-gpu", 14, "{detail}"


class NoRoomOnHost(LimosaError):
    """Too little disk or host memory."""

    id, exit_code, template = "no-room-on-host", 15, "{detail}"


# --- 16, 17, 23, 24: images ----------------------------------------------------------------------------------


class DamagedImage(LimosaError):
    """The image is not whole, or not an image."""

    id, exit_code, template = "damaged-image", 16, "image {path} is damaged: {detail}"


class NoSuchImage(DamagedImage):
    """There is nothing where the image should be."""

    id, template = "no-such-image", "there is no image at {path}"
    hint_template = "limosa images DIR lists images"


class NotAnImage(NoSuchImage):
    """There is something, and it never was an image."""

    id, template = "not-an-image", "{path} is not an image: {detail}"
    hint_template = "name the folder that limosa checkpoint wrote (its --output)"


class UnfinishedImage(DamagedImage):
    """A folder that an unfinished checkpoint left."""

    id, template = "unfinished-image", "{path} is not an image: a checkpoint left it unfinished"
    hint_template = "limosa rm {path}"


class DestinationExists(LimosaError):
    """The destination is there already and is not an empty folder."""

    id, exit_code, template = "destination-exists", 17, "{path} {what}"
    hint_template = "name another folder"


class NoWorkingCriu(LimosaError):
    """No CRIU passes the trial here."""

    id, exit_code, template = "no-working-criu", 24, "no working CRIU: {detail}"
    hint_template = "limosa doctor --fix fetches one"


class CriuNotPermitted(NoWorkingCriu):
    """No CRIU may run for this user: CRIU needs root, or capabilities."""

    id, exit_code, template = "criu-not-permitted", 11, "CRIU is not permitted to run: {detail}"
    hint_template = "use sudo"


# --- 18, 21, 22: undone --------------------------------------------------------------------------------------


class TimedOutUndone(LimosaError):
    """The time limit was reached; everything was undone."""

    id, exit_code, template = "timed-out", 18, "{what} took longer than {seconds:g} s and was undone"


class PauseTooLong(TimedOutUndone):
    """The pause would be (or was about to become) longer than --max-pause allows."""

    id, template = "pause-too-long", "the pause would be about {estimate:.2g} s, more than the {limit:g} s allowed"


class FailedUndone(LimosaError):
    """A step failed; everything was undone. ``fields["image"]`` where an image was committed all the same."""

    id, exit_code, template = "failed", 21, "{what} failed and was undone: {detail}"


class CancelledUndone(LimosaError):
    """Cancelled; everything was undone."""

    id, exit_code, template = "cancelled", 22, "{what} was cancelled and undone"


# --- 40, 41: look --------------------------------------------------------------------------------------------


class UndoFailed(LimosaError):
    """A step failed and so did its undo: every copy was left where it is."""

    id, exit_code, template = (
        "undo-failed",
        40,
        "{what} failed ({detail}), and undoing it failed as well: {undo_detail}",
    )
    hint_template = "limosa recover"


class NotFinished(UndoFailed):
    """A step failed after which there is no way back: the job is where it was to go, and waits there."""

    id, template = "not-finished", "{what} failed ({detail}): {undo_detail}"


class LeftSuspended(LimosaError):
    """The job is suspended, its memory safe on the host."""

    id, exit_code, template = "left-suspended", 41, "{detail}; the job is suspended, its memory safe on the host"
    hint_template = "limosa resume {pid} when there is room"


# --- driver calls (turned into one of the above by operations) -----------------------------------------------


class DriverError(LimosaError):
    """A driver call failed.

    Attributes (in ``fields``): ``call``, ``result`` (the CUresult's name), ``code`` (its number), ``pid``.
    """

    id, exit_code = "driver-error", 12
    template = "{call} on process {pid}: {result} ({code}): {meaning}"

    @property
    def result(self) -> str:
        """The CUresult's name, e.g. ``CUDA_ERROR_INVALID_VALUE``."""
        return str(self.fields.get("result", ""))


class DriverTimeout(DriverError):
    """The driver did not take the lock in time (``CUDA_ERROR_NOT_READY``)."""

    id, exit_code = "driver-timeout", 18


class IllegalState(DriverError):
    """The process is in a state in which this call is not possible."""

    id = "illegal-state"


class NotSupported(DriverError):
    """The driver cannot checkpoint what this process uses."""

    id, exit_code = "not-supported", 13


class HeldByImport(NotSupported):
    """The process has memory that another one made (a parked move): the driver could save it and never restore it."""

    id = "imported-memory"


class NoCudaState(DriverError):
    """The process holds no CUDA state (the driver answers NOT_INITIALIZED)."""

    id = "no-cuda-state"


class DriverNoSuchProcess(DriverError):
    """The driver finds no such process."""

    id, exit_code = "driver-no-such-process", 10


class DriverHung(LimosaError):
    """A driver call did not come back within its limit; it may still be under way."""

    id, exit_code = "driver-hung", 18
    template = "{call} on process {pid} has not returned after {seconds:g} s"


class CriuFailed(LimosaError):
    """CRIU ended with an error; ``reason`` is the first real error of its log as a sentence."""

    id, exit_code, template = "criu-failed", 21, "CRIU could not {what}: {reason} (log: {log})"
    _TAKEN_OR_CHANGED = frozenset({"pid-taken", "port-taken", "size-changed", "mode-changed", "file-missing"})

    def __init__(self, message: str | None = None, **fields: Any):
        super().__init__(message, **fields)
        if fields.get("kind") in self._TAKEN_OR_CHANGED:  # of a restore: the same as where it is seen before
            self.exit_code = 23  # type: ignore[misc]


# --- 125..127: `run` itself ----------------------------------------------------------------------------------


class RunFailed(LimosaError):
    """``limosa run`` itself failed: the job was not started."""

    id, exit_code, template = "run-failed", 125, "{detail}"


class CommandNotExecutable(RunFailed):
    """The command is there and cannot be executed."""

    id, exit_code, template = "not-executable", 126, "cannot execute {command}: {detail}"


class CommandNotFound(RunFailed):
    """There is no such command."""

    id, exit_code, template = "command-not-found", 127, "there is no command {command}"


class JobSuspended(LimosaError):
    """The job is suspended: it cannot handle a signal before it has its GPU back."""

    id, exit_code = "suspended", 13
    template = "process {pid} is suspended: it cannot save anything or end by itself before it is resumed"
    hint_template = "resume it first: limosa resume {job}; or end it and lose what it holds: limosa stop {job} --kill"


class Refused(LimosaError):
    """The plan said no; nothing was touched. Id and exit code are those of the first refusal."""

    def __init__(self, reasons: Sequence[Reason]):
        self.reasons = [r for r in reasons if r.refuses]
        first = self.reasons[0]
        text = first.text if len(self.reasons) == 1 else "; ".join(r.text for r in self.reasons)
        hints = dict.fromkeys(r.hint for r in self.reasons if r.hint)
        super().__init__(text, hint="; ".join(hints), job_state="")
        self.warnings = [r for r in reasons if not r.refuses]
        # Instance values shadow the class's: a refusal is as diverse as its reasons.
        self.id = first.id  # type: ignore[misc]
        self.exit_code = first.exit_code  # type: ignore[misc]


def worst(codes: Sequence[int]) -> int:
    """The exit code for several jobs: 40, else 41, else 1, else the first failure's, else 0."""
    return next((code for code in (40, 41, 1) if code in codes), next((code for code in codes if code), 0))
