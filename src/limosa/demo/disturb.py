"""What the demo does to the training: which disturbances this machine can show, and doing them one by one."""

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
from limosa.demo.training import Stack, Training, find_stack
from limosa.errors import CancelledUndone, LimosaError
from limosa.process.follow import adopting
from limosa.progress import Progress, ProgressFn

MOVE, SUSPEND, CHECKPOINT = "move there and back", "suspend, resume", "checkpoint, kill, restore"
_GPU_ROOM = 3 << 30  # bytes free that a GPU must have to take part; the training itself needs less than one GiB
_STEPS, _STEPS_CUDA = 400, 1000  # at 20 ms and a bit; the job goes on while the first driver call initialises all GPUs
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
        framework: "torch" or "numpy".
        device: "cuda" or "cpu".
        gpus: the names of the GPUs that took part.
        steps: how many losses were compared.
        same_bits: whether all of them are equal to the bit.
        first_difference: the first step whose losses differ, or None.
        last_loss: both runs' last loss, undisturbed first, as hex floats.
        did, not_done: the disturbances.
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

    @property
    def exit_code(self) -> int:
        """0 where something was disturbed and the bits are the same; else 1, or why nothing could be disturbed."""
        if not self.same_bits:
            return 1
        return 0 if self.did else next((n.exit_code for n in self.not_done if n.exit_code), 1)


class Show(msgspec.Struct, kw_only=True):
    """How the demo tells its caller what it is doing.

    Attributes:
        tell: a sentence.
        steps: (run, done, of all): the training's progress; run is "undisturbed" or "disturbed".
        progress: an operation's own progress.
        cancel: set it to end the demo; an operation under way is undone first.
    """

    tell: Callable[[str], None]
    steps: Callable[[str, int, int], None]
    progress: ProgressFn
    cancel: threading.Event = msgspec.field(default_factory=threading.Event)

    def step(self, run: str, of: int) -> Callable[[int], None]:
        """What a run is given to report its steps to; it is also where a cancelled demo ends.

        Raises (what is returned):
            CancelledUndone: the demo was cancelled.
        """

        def seen(done: int) -> None:
            if self.cancel.is_set():
                raise CancelledUndone(what="the demo")
            self.steps(run, done, of)

        return seen


def run(show: Show, *, steps: int | None = None, pace: float = 0.02, only_numpy: bool = False) -> DemoResult:
    """Runs the training twice, disturbs the second, compares.

    Args:
        show: told what is going on.
        steps: training steps; None for as many as leave time between the disturbances.
        pace: seconds of sleep after each, so that people can watch.
        only_numpy: do not use PyTorch.

    Raises:
        LimosaError: a disturbance failed, or the training did; its folder is kept and named then.
    """
    gpus, no_gpus = usable_gpus()
    stack = find_stack(len(gpus), only_numpy)
    with_cuda = stack.device == "cuda"
    steps = steps or (_STEPS_CUDA if with_cuda else _STEPS)
    whys = reasons(len(gpus), no_gpus, stack)
    first = gpus[0].uuid if with_cuda else ""
    show.tell(f"training with {stack.framework} on the {'GPU' if with_cuda else 'CPU'}, {steps} steps, twice")
    folder = Path(tempfile.mkdtemp(prefix="limosa-demo-"))
    did: list[Did] = []
    try:
        with adopting():
            with Training(folder / "undisturbed", stack, steps, pace, first) as twin:
                twin.wait_for_end(show.step("undisturbed", steps))
                expected = twin.losses()
            with Training(folder / "disturbed", stack, steps, pace, first) as job:
                at = (steps * n // 5 for n in (1, 2, 3))
                for name in (n for n in (MOVE, SUSPEND, CHECKPOINT) if n not in whys):
                    job.wait_for(next(at), show.step("disturbed", steps))
                    try:
                        did += _disturb(name, job, gpus, folder / "image", show)
                    except LimosaError as error:
                        if error.exit_code not in _CANNOT:
                            raise
                        whys[name] = NotDone(operation=name, why=error.message, exit_code=error.exit_code)
                        show.tell(f"{name}: not here: {error.message}")
                job.wait_for_end(show.step("disturbed", steps))
                found = job.losses()
    except CancelledUndone:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    except LimosaError as error:
        error.hint = error.hint or f"what the demo left is in {folder}"
        raise
    shutil.rmtree(folder)
    names = [g.name for g in gpus] if with_cuda else []
    return compare(stack, names, expected, found, did=did, not_done=list(whys.values()))


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


def usable_gpus() -> tuple[list[gpu.Gpu], str]:
    """The GPUs to use, at most two of one chip, those with most free memory first; and why not more, or ""."""
    try:
        found = gpu.inventory().gpus
    except LimosaError as error:
        return [], error.message
    fit = [g for g in found if not g.mig and g.compute_mode != "prohibited" and g.memory_free >= _GPU_ROOM]
    fit.sort(key=lambda g: (-g.memory_free, g.index))
    alike = [g for g in fit if g.name == fit[0].name][:2]
    if len(alike) > 1:
        return alike, ""
    if len(found) > 1:
        return alike, f"of {len(found)} GPUs fewer than two of one chip have {_GPU_ROOM >> 30} GiB free and no MIG"
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
    if name == MOVE:
        there = _timed(job, "move there", show, lambda: _move(job, gpus[1], show))
        _some_steps(job, show)
        return [there, _timed(job, "move back", show, lambda: _move(job, gpus[0], show))]
    if name == SUSPEND:
        return [_timed(job, name, show, lambda: _suspend_and_resume(job, gpus[0], show))]
    return [_timed(job, name, show, lambda: _checkpoint_and_restore(job, image, show))]


def _some_steps(job: Training, show: Show) -> None:
    job.wait_for(min(len(job.lines()) + 10, job.steps), show.step("disturbed", job.steps))


def _timed(job: Training, name: str, show: Show, action: Callable[[], tuple[int, str]]) -> Did:
    show.tell(f"{name} at step {len(job.lines())}")
    step, begin = len(job.lines()), time.monotonic()
    moved, text = action()
    seconds = time.monotonic() - begin
    if step >= job.steps:
        raise LimosaError(f"the training had ended before it could be disturbed ({name}): more --steps are needed")
    # The next step ends the pause: without it there is no gap to measure.
    job.wait_for(min(len(job.lines()) + 1, job.steps), show.step("disturbed", job.steps))
    pause = job.longest_gap(begin)
    show.tell(f"{name}: {text}; took {seconds:.2f} s, the training stood still for {pause:.2f} s")
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


def _suspend_and_resume(job: Training, here: gpu.Gpu, show: Show) -> tuple[int, str]:
    result = operation.suspend(job.root, progress=show.progress, cancel=show.cancel)[0].result
    assert result is not None
    if any(g.holds(job.root.pid) for g in gpu.inventory().gpus):
        raise LimosaError(f"process {job.root.pid} is suspended and still on a GPU", job_state="checkpointed")
    before = len(job.lines())
    time.sleep(1.0)
    if len(job.lines()) > before + 1:
        raise LimosaError(f"process {job.root.pid} is suspended and goes on", job_state="unknown")
    operation.resume(job.root, progress=show.progress, cancel=show.cancel)
    return result.bytes, f"put aside in host memory for a second, GPU {here.index} free meanwhile"


def _checkpoint_and_restore(job: Training, image: Path, show: Show) -> tuple[int, str]:
    old = job.root
    written = operation.checkpoint(old, image, progress=show.progress, cancel=show.cancel)
    if old.alive():
        raise LimosaError(f"process {old.pid} was to be ended by its checkpoint and runs on", job_state="running")
    show.progress(Progress(step="killed", message=f"process {old.pid} is gone, the image is all that is left of it"))
    job.restored(operation.restore(image, progress=show.progress, cancel=show.cancel).pid)
    with contextlib.suppress(OSError):
        shutil.rmtree(image)
    size = written.bytes / 1e6
    return written.bytes, f"{size:.0f} MB on disk, the process gone, back as a new one"
