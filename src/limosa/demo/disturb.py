"""What the demo does to its job: which disturbances this machine can show, and doing them one by one."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from limosa import gpu, operation
from limosa.demo.training import Ranks, Stack, Training, find_stack
from limosa.errors import CancelledUndone, LimosaError, NoSuchProcess, UsageError
from limosa.process.follow import adopting
from limosa.progress import Progress, ProgressFn

MOVE, SUSPEND, CHECKPOINT = "move there and back", "suspend, resume", "checkpoint, kill, restore"
SWAP, SWAPPED = "swap the GPUs", "checkpoint, kill, restore onto swapped GPUs"
_DONE_TO: dict[type[Training], tuple[str, ...]] = {
    Training: (MOVE, SUSPEND, CHECKPOINT),
    Ranks: (SWAP, SUSPEND, SWAPPED),
}
_GPU_ROOM = 3 << 30  # bytes free that a GPU must have to take part; the training itself needs less than one GiB
_SOFT_ROOM = 256 << 20  # a software GPU
# At 20 ms and a bit; on real GPUs the job goes on while the first driver call initialises all of them.
_STEPS, _STEPS_CUDA, _STEPS_SOFT, _STEPS_TOO = 400, 1000, 400, 200
_ATTEMPTS = 4  # each with twice the steps of the one before
_CANNOT = (11, 12, 24)  # no permission, the GPU or driver cannot do it, no working CRIU: this machine's, not the demo's


class Did(msgspec.Struct, kw_only=True):
    """A disturbance that was done.

    Attributes:
        operation: its name.
        step: the training's step at which it began.
        seconds: how long it took from the outside.
        pause_seconds: how long the training stood still, by its own time stamps.
        bytes: device memory moved, or the image's size.
        text: what happened, for people.
    """

    operation: str
    step: int
    seconds: float
    pause_seconds: float = 0.0
    bytes: int = 0
    text: str = ""


class NotDone(msgspec.Struct, kw_only=True):
    """A disturbance that was not done, and why."""

    operation: str
    why: str
    exit_code: int = 0


class DemoResult(msgspec.Struct, kw_only=True):
    """What the demo showed.

    Attributes:
        framework: "torch", "numpy", or "cuda" for a program that computes on device memory.
        device: "cuda" or "cpu".
        gpus: the names of the GPUs that took part.
        software: why these are software GPUs, or "" where they are real (or there are none).
        steps: how many losses were compared.
        same_bits: whether all of them are equal to the bit.
        first_difference: the first step whose losses differ, or None.
        last_loss: both runs' last loss (a hex float) or hash, undisturbed first.
        did, not_done: the disturbances.
        ranks: with two GPUs: the same for a job of two ranks that talk over NCCL.
        cpu: on software GPUs: the same for a training on the CPU, which is no less real than on any machine.
    """

    framework: str
    device: str
    gpus: list[str]
    steps: int
    same_bits: bool
    first_difference: int | None
    last_loss: list[str]
    did: list[Did]
    not_done: list[NotDone]
    software: str = ""
    ranks: DemoResult | None = None
    cpu: DemoResult | None = None

    @property
    def exit_code(self) -> int:
        """0 where something was disturbed and the bits are the same; else 1, or why nothing could be disturbed."""
        if not all(one.same_bits for one in (self, self.ranks, self.cpu) if one is not None):
            return 1
        return 0 if self.did else next((n.exit_code for n in self.not_done if n.exit_code), 1)


class Show(msgspec.Struct, kw_only=True):
    """How the demo tells its caller what it is doing.

    Attributes:
        tell: a sentence.
        steps: (run, done, of all): the job's progress; run is "undisturbed", "disturbed", or one of them after "CPU" or
            "ranks".
        progress: an operation's own progress.
        cancel: set it to end the demo; an operation under way is undone first.
        label: put before the name of a run.
    """

    tell: Callable[[str], None]
    steps: Callable[[str, int, int], None]
    progress: ProgressFn
    cancel: threading.Event = msgspec.field(default_factory=threading.Event)
    label: str = ""

    def step(self, run: str, of: int) -> Callable[[int], None]:
        """What a run is given to report its steps to; it is also where a cancelled demo ends.

        Raises (what is returned):
            CancelledUndone: the demo was cancelled.
        """

        def seen(done: int) -> None:
            if self.cancel.is_set():
                raise CancelledUndone(what="the demo")
            self.steps(f"{self.label}{run}", done, of)

        return seen


def run(
    show: Show, *, steps: int | None = None, pace: float = 0.02, only_numpy: bool = False, why_no_gpus: str = ""
) -> DemoResult:
    """Runs a job twice, disturbs the second, compares. Then, with two GPUs, two ranks; without real ones, on the CPU.

    Args:
        show: told what is going on.
        steps: the job's; None for as many as leave time between the disturbances. More where it had ended before one.
        pace: seconds of sleep after each, so that people can watch.
        only_numpy: do not use PyTorch.
        why_no_gpus: what to say of that instead of what is found; on software GPUs: why these.

    Raises:
        LimosaError: a disturbance failed, or the job did; its folder is kept and named then.
    """
    gpus, no_gpus = usable_gpus()
    software = bool(gpus) and gpu.inventory().software
    stack = find_stack(len(gpus), only_numpy, software=software)
    whys = reasons(len(gpus), no_gpus if gpus else why_no_gpus or no_gpus, stack)
    if not software or stack.device != "cuda":
        many = steps or (_STEPS_CUDA if stack.device == "cuda" else _STEPS)
        result = _twice(show, stack, gpus, steps=many, pace=pace, whys=whys)
        if len(gpus) > 1 and stack.device == "cuda" and stack.framework == "torch":  # which brings NCCL
            result.ranks = _ranks_too(show, stack, gpus, steps or _STEPS_TOO, pace)
        return result
    show.tell(f"{why_no_gpus + ': ' if why_no_gpus else ''}this runs on software GPUs, a driver in software that")
    show.tell("keeps the real one's rules; the job, Limosa and CRIU are the real ones. For the real thing:")
    show.tell("limosa demo on a machine with an NVIDIA GPU (two, to see it move) and driver 580 or newer")
    try:
        on_cpu_stack = find_stack(0)  # looked for first: half a minute later is late for it
    except UsageError as error:
        on_cpu_stack = None
        show.tell(f"the training on the CPU, which would follow, is left out: {error.message} ({error.hint})")
    result = _twice(show, stack, gpus, steps=steps or _STEPS_SOFT, pace=pace, whys=whys)
    result.software = why_no_gpus or "the demo was started on them"
    if len(gpus) > 1:
        result.ranks = _ranks_too(show, stack, gpus, steps or _STEPS_TOO, pace)
    if on_cpu_stack is None:
        return result
    on_cpu = {name: NotDone(operation=name, why="it has nothing on a GPU") for name in (MOVE, SUSPEND)}
    on_cpu_show = msgspec.structs.replace(show, label="CPU ")
    result.cpu = _twice(on_cpu_show, on_cpu_stack, [], steps=steps or _STEPS_TOO, pace=pace, whys=on_cpu)
    result.cpu.not_done = [n for n in result.cpu.not_done if n.operation == CHECKPOINT]
    return result


def _ranks_too(show: Show, stack: Stack, gpus: list[gpu.Gpu], steps: int, pace: float) -> DemoResult:
    """The same with two ranks over NCCL, whose GPUs are swapped."""
    labelled = msgspec.structs.replace(show, label="ranks ")
    return _twice(labelled, stack, gpus, steps=steps, pace=pace, whys={}, kind=Ranks)


def _twice(
    show: Show,
    stack: Stack,
    gpus: list[gpu.Gpu],
    *,
    steps: int,
    pace: float,
    whys: dict[str, NotDone],
    kind: type[Training] = Training,
) -> DemoResult:
    """One job, undisturbed and disturbed; ``whys`` says what is not done to it.

    A slow machine takes longer for a disturbance than the job for its steps: then both run again, with more.
    """
    with_cuda, ranks = stack.device == "cuda", kind is Ranks
    first = ",".join(g.uuid for g in gpus[: 2 if ranks else 1]) if with_cuda else ""
    where = "two GPUs, over NCCL" if ranks else "the GPU" if with_cuda else "the CPU"
    for many in (steps << n for n in range(_ATTEMPTS)):
        show.tell(f"{what_runs(stack.framework)} on {where}, {many} steps, twice")
        folder = Path(tempfile.mkdtemp(prefix="limosa-demo-"))

        def begin(name: str, folder: Path = folder, many: int = many) -> Training:
            return kind(folder / name, stack, many, pace, first)

        try:
            expected, found, did = _both(show, begin, gpus, folder / "image", whys)
        except CancelledUndone:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        except _EndedBefore as error:
            shutil.rmtree(folder)
            show.tell(f"{error}: the job had ended before; again, with more steps")
            continue
        except LimosaError as error:
            error.hint = error.hint or f"what the demo left is in {folder}"
            raise
        shutil.rmtree(folder)
        names = [g.name for g in gpus] if with_cuda else []
        return compare(stack, names, expected, found, did=did, not_done=list(whys.values()))
    raise LimosaError(f"with {many} steps, too, the job had ended before all was done to it: raise --pace")


class _EndedBefore(Exception):
    """The job had done all its steps before what the text names could be done to it."""


def _both(
    show: Show, begin: Callable[[str], Training], gpus: list[gpu.Gpu], image: Path, whys: dict[str, NotDone]
) -> tuple[list[str], list[str], list[Did]]:
    """Runs the job undisturbed, then disturbed: the losses of each, and what was done; ``whys`` is added to.

    Raises:
        _EndedBefore: it ended too early.
    """
    did: list[Did] = []
    with adopting():
        with begin("undisturbed") as twin:
            twin.wait_for_end(show.step("undisturbed", twin.steps))
            expected = twin.losses()
        with begin("disturbed") as job:
            at = (job.steps * n // 5 for n in (1, 2, 3))
            for name in (n for n in _DONE_TO[type(job)] if n not in whys):
                job.wait_for(next(at), show.step("disturbed", job.steps))
                try:
                    did += _disturb(name, job, gpus, image, show)
                except LimosaError as error:
                    if error.exit_code == NoSuchProcess.exit_code and len(job.lines()) == job.steps:
                        raise _EndedBefore(name) from error
                    if error.exit_code not in _CANNOT:
                        raise
                    whys[name] = NotDone(operation=name, why=error.message, exit_code=error.exit_code)
                    show.tell(f"{name}: not here: {error.message}")
            job.wait_for_end(show.step("disturbed", job.steps))
            return expected, job.losses(), did


def compare(
    stack: Stack, gpus: list[str], expected: list[str], found: list[str], *, did: list[Did], not_done: list[NotDone]
) -> DemoResult:
    """The result: whether two runs' losses (hex floats) are the same to the bit, and where they part."""
    longest = max(len(expected), len(found))
    different = [n for n in range(longest) if expected[n : n + 1] != found[n : n + 1]]
    return DemoResult(
        framework=stack.framework,
        device=stack.device,
        gpus=gpus,
        steps=longest,
        same_bits=bool(expected) and not different,
        first_difference=different[0] if different else None,
        last_loss=[losses[-1] if losses else "" for losses in (expected, found)],
        did=did,
        not_done=not_done,
    )


def what_runs(framework: str) -> str:
    """The job in words."""
    return "a program on device memory" if framework == "cuda" else f"a training with {framework}"


def usable_gpus() -> tuple[list[gpu.Gpu], str]:
    """The GPUs to use, at most two of one chip, those with most free memory first; and why not more, or ""."""
    try:
        inventory = gpu.inventory()
    except LimosaError as error:
        return [], error.message
    found, room = inventory.gpus, _SOFT_ROOM if inventory.software else _GPU_ROOM
    fit = [g for g in found if not g.mig and g.compute_mode != "prohibited" and g.memory_free >= room]
    fit.sort(key=lambda g: (-g.memory_free, g.index))
    alike = [g for g in fit if g.name == fit[0].name][:2]
    if len(alike) > 1:
        return alike, ""
    if len(found) > 1:
        return alike, f"of {len(found)} GPUs fewer than two of one chip have {room >> 20} MiB free and no MIG"
    return alike, "there is one GPU only" if found else "there is no NVIDIA GPU"


def reasons(gpus: int, no_gpus: str, stack: Stack) -> dict[str, NotDone]:
    """Why this machine cannot show each disturbance, by its name; what is not in it can be shown."""
    why = {}
    if stack.device != "cuda":
        text = stack.why if gpus else no_gpus
        why = {MOVE: text, SUSPEND: text}
    elif gpus < 2:
        why = {MOVE: no_gpus}
    return {name: NotDone(operation=name, why=text) for name, text in why.items()}


def _disturb(name: str, job: Training, gpus: list[gpu.Gpu], image: Path, show: Show) -> list[Did]:
    """Does one disturbance to the running job; what it consists of, each with its times."""

    def timed(name: str, action: Callable[[], tuple[int, str]]) -> Did:
        return _timed(job, name, show, action)

    if name == MOVE:
        there = timed("move there", lambda: _move(job, gpus[1], show))
        job.wait_for(min(len(job.lines()) + 10, job.steps), show.step("disturbed", job.steps))
        return [there, timed("move back", lambda: _move(job, gpus[0], show))]
    if name == SUSPEND:
        return [timed(name, lambda: _suspend_and_resume(job, gpus, show))]
    swapped = dict(zip((one.uuid for one in gpus), (one.uuid for one in reversed(gpus)), strict=True))
    if name == SWAP:
        return [timed(name, lambda: _swap(job, swapped, show))]
    return [timed(name, lambda: _checkpoint_and_restore(job, image, swapped if name == SWAPPED else None, show))]


def _timed(job: Training, name: str, show: Show, action: Callable[[], tuple[int, str]]) -> Did:
    show.tell(f"{name} at step {len(job.lines())}")
    step, begin = len(job.lines()), time.monotonic()
    moved, text = action()
    seconds = time.monotonic() - begin
    if step >= job.steps:
        raise _EndedBefore(name)
    # The next step ends the pause: without it there is no gap to measure.
    job.wait_for(min(len(job.lines()) + 1, job.steps), show.step("disturbed", job.steps))
    pause = job.longest_gap(begin)
    show.tell(f"{name}: {text}; took {seconds:.2f} s, the job stood still for {pause:.2f} s")
    return Did(
        operation=name, step=step, seconds=round(seconds, 3), pause_seconds=round(pause, 3), bytes=moved, text=text
    )


def _move(job: Training, to: gpu.Gpu, show: Show) -> tuple[int, str]:
    result = operation.move(job.root, to=to.uuid, progress=show.progress, cancel=show.cancel)[0].result
    assert result is not None
    where = [g.index for g in gpu.inventory().gpus if g.holds(job.root.pid)]
    if where != [to.index]:
        raise LimosaError(f"process {job.root.pid} was moved to GPU {to.index} and is on {where}", job_state="running")
    return result.bytes, f"now on GPU {to.index}"


def _swap(job: Training, swapped: dict[str, str], show: Show) -> tuple[int, str]:
    before = job.gpus()
    result = operation.move(job.root, gpu_map=swapped, progress=show.progress, cancel=show.cancel)[0].result
    assert result is not None
    _refuse_elsewhere(job, before, swapped)
    return result.bytes, "each rank is on the other's GPU"


def _refuse_elsewhere(job: Training, before: dict[int, list[str]], swapped: dict[str, str]) -> None:
    after = job.gpus()
    if len(before) != 2 or after != {pid: [swapped[uuid] for uuid in on] for pid, on in before.items()}:
        raise LimosaError(f"the ranks were on {before} and are on {after}", job_state="running")


def _suspend_and_resume(job: Training, gpus: list[gpu.Gpu], show: Show) -> tuple[int, str]:
    before_on = job.gpus()
    result = operation.suspend(job.root, progress=show.progress, cancel=show.cancel)[0].result
    assert result is not None
    if job.gpus():
        raise LimosaError(f"process {job.root.pid} is suspended and still on a GPU", job_state="checkpointed")
    before = len(job.lines())
    time.sleep(1.0)
    if len(job.lines()) > before + 1:
        raise LimosaError(f"process {job.root.pid} is suspended and goes on", job_state="unknown")
    operation.resume(job.root, progress=show.progress, cancel=show.cancel)
    free = " and ".join(str(g.index) for g in gpus if any(g.uuid in on for on in before_on.values()))
    return result.bytes, f"put aside in host memory for a second, GPU {free} free meanwhile"


def _checkpoint_and_restore(job: Training, image: Path, swapped: dict[str, str] | None, show: Show) -> tuple[int, str]:
    old = job.root
    before = job.gpus() if swapped else {}
    written = operation.checkpoint(old, image, progress=show.progress, cancel=show.cancel)
    if old.alive():
        raise LimosaError(f"process {old.pid} was to be ended by its checkpoint and runs on", job_state="running")
    show.progress(Progress(step="killed", message=f"process {old.pid} is gone, the image is all that is left of it"))
    job.restored(operation.restore(image, gpu_map=swapped, progress=show.progress, cancel=show.cancel).pid)
    if swapped:
        _refuse_elsewhere(job, before, swapped)
    with contextlib.suppress(OSError):
        shutil.rmtree(image)
    size = written.bytes / (1 << 20)
    return written.bytes, f"{size:.0f} MiB on disk, the process gone, back as a new one"
