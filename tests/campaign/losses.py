"""What has to be when the driver itself loses a job: it is said, nothing is called undone, and no copy is dropped."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from campaign.processes import Found

if TYPE_CHECKING:
    from campaign.run import Run

ASLEEP = ("suspend", "toggle-down", "checkpoint")
"""Operations that end before the driver is asked to take the job back: nobody can know yet."""
AWAKENING = ("resume", "resume-to", "toggle-up")


def judge(run: Run, found: Found) -> None:
    """A job that the driver will not take back, ever."""
    room, problems, rc = run.room, run.problems, found.rc
    early = run.hazard is not None and run.hazard.early
    image = room.base / "images" / "image-new"
    if run.operation in ("restore", "restore-to"):
        _from_image(run, found)
    elif run.case.operation in ASLEEP:
        if rc != 0:
            problems.append(f"exit code {rc}, and nothing could be known yet: {found.short()}")
        argv = ["restore", str(image)] if run.operation == "checkpoint" else ["resume", str(run.jobs[0].pid)]
        again = room.operate([*argv, "-o", "json"], points=False)
        problems += room.settle()
        if again.rc not in (21, 40):
            problems.append(f"the job cannot come back, and {again.short()}")
        if run.operation == "checkpoint":
            if run.jobs[0].alive() or not run.whole_image():
                problems.append("a job that could not be restored is not in its image alone")
        else:
            _kept(run, again)
    elif rc == 40 or (run.operation in AWAKENING and early and rc == 21) or (rc == -9 and "kill" in run.fault):
        _kept(run, found)
    else:
        problems.append(f"the job is lost, and {found.short()}")
    end(run)


def _from_image(run: Run, found: Found) -> None:
    """The image is the copy: nothing was started, and where the driver takes another process it can be restored."""
    problems = run.problems
    path = run.room.images[f"a-{run.case.victim}"]
    recovering = run.case.operation.startswith("recover")
    if found.rc not in ((0, 40) if recovering else (21,)):
        problems.append(f"the image's job could not come back, and {found.short()}")
    if run.jobs[0].alive():
        problems.append("what could not be restored was not ended")
    if not path.exists():
        problems.append("the image is gone")
    elif run.hazard is None or not run.hazard.early:
        run.room.well(["restore", str(path), "-o", "json"])
        run.jobs[0].goes_on()
        run.jobs[0].prove()


def _kept(run: Run, found: Found) -> None:
    """Every process of it lives on with its host memory, is asleep, and is not said to run; others are as they were."""
    room, problems = run.room, run.problems
    states = [room.state(job) for job in run.jobs]
    exits = run.case.victim == "exits"  # by itself: one of two, the other is the one that is lost
    for job, state in zip(run.jobs, states, strict=True):
        if state == "gone" and exits:
            continue
        if state == "running":
            job.goes_on()
            job.prove()
        elif len(job.session()) < job.slots:
            problems.append(f"processes of a lost job were ended: {job.session()} instead of {job.slots}")
    asleep = [state for state in states if state == "checkpointed" or state.startswith("mixed checkpointed")]
    lost = len(run.jobs) if run.hazard is not None and run.hazard.early else 1
    if len(asleep) != lost or set(states) - {*asleep, "running", *(["gone"] if exits else [])}:
        problems.append(f"{lost} lost, and the jobs are {states}")
    if found.error.get("job_state") == "running":
        problems.append("a lost job is said to run")
    again = room.operate(["recover", "-o", "json"], points=False)
    problems += room.settle()
    run.told["recovered"] = again.rc
    if again.rc == 0 and not room.suspended_records():
        problems.append(f"recover says that all is well: {again.answer}")
    if [room.state(job) for job in run.jobs] != states:
        problems.append(f"recover has changed a lost job: {states} → {[room.state(job) for job in run.jobs]}")


def end(run: Run) -> None:
    """Whoever waits for it gives up: the job is killed, and what is left of the operation can be cleaned up."""
    room, problems = run.room, run.problems
    room.ground.disarm()
    for key in list(room.jobs):
        room.end(key)
    again = room.operate(["recover", "-o", "json"], points=False)
    problems += room.settle()
    if again.rc != 0:
        problems.append(f"recover after the job's end: {again.short()} {again.answer.get('recovered')}")
    for path in (room.base / "images").glob(".*limosa-partial*"):
        room.well(["rm", str(path), "-o", "json"])
    for path in (room.base / "images").iterdir():
        shutil.rmtree(path)
    room.images.clear()
    left = room.litter()
    if left:
        problems.append(f"left lying about: {left}")
    run.leaks(alone=True)
