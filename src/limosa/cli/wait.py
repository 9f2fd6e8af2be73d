"""``limosa wait``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from limosa.cli import words
from limosa.cli.options import ONE_JOB
from limosa.cli.output import Report
from limosa.cli.run import ENDED_BY_CHECKPOINT
from limosa.cli.verb import verb
from limosa.errors import CancelledUndone, LimosaError, RunFailed

if TYPE_CHECKING:
    from limosa.operation.results import WaitResult


@verb(
    ONE_JOB,
)
def command(report: Report, *, job: str) -> None:
    """Wait until a job has ended, and exit as it did.

    limosa wait train && limosa run --name test -- python3 test.py

    Exit code: the job's, or 128 + the signal that ended it. 75: a checkpoint
    ended it. 125: the code cannot be known (Linux before 6.15), or limosa
    itself failed: there is no living job of that name, say. image in -o json
    tells a checkpoint from a job whose own exit code is 75.
    """
    from limosa.cli.signals import cancelling
    from limosa.operation import wait

    try:
        with cancelling(report, "") as cancel:
            done = wait(job, cancel=cancel)
    except LimosaError as error:
        if isinstance(error, CancelledUndone):
            error.job_state = ""  # as it was, suspended say: nobody has asked
        error.exit_code = RunFailed.exit_code  # type: ignore[misc]  # 1..40 would look like the job's own
        raise
    report.result(done, _text(done), exit_code=code_of(done))


def code_of(done: WaitResult) -> int:
    """The exit code that tells how the job ended."""
    if done.image:
        return ENDED_BY_CHECKPOINT
    return RunFailed.exit_code if done.exit_code is None else done.exit_code


def _text(done: WaitResult) -> str:
    who = words.job(done.name, done.pid)
    if done.image:
        return f"a checkpoint ended {who}; its image is {words.clean(done.image)}"
    if done.exit_code is None:
        return f"{who} ended at {done.ended}; its exit code is not known here"
    return f"{who} ended at {done.ended} with exit code {done.exit_code}"
