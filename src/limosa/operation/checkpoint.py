"""``checkpoint``: a job becomes an image on disk, and ends there or runs on.

lock → checkpoint → criu dump; for jobs under the shim beside it ``saving.py``. What is done is in ``steps/dumping.py``.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from typing import TYPE_CHECKING

from limosa.operation.checkpoint_plan import look_at
from limosa.operation.dump_options import Options
from limosa.operation.holding import while_it_grows
from limosa.operation.jobs import JobLike, job
from limosa.operation.options import CheckpointOptions as Keywords
from limosa.operation.options import check_names, check_seconds
from limosa.operation.results import CheckpointResult
from limosa.operation.steps.container_dump import ContainerDumping
from limosa.operation.steps.dumping import Dumping
from limosa.operation.verbs import CHECKPOINT
from limosa.operation.work import Work
from limosa.process.criu.find import find as find_criu
from limosa.progress import ProgressFn, silent

if TYPE_CHECKING:
    from typing_extensions import Unpack


def checkpoint(
    like: JobLike,
    output: str | os.PathLike[str],
    *,
    timeout: float | None = None,
    progress: ProgressFn = silent,
    cancel: threading.Event | None = None,
    **options: Unpack[Keywords],
) -> CheckpointResult:
    """Writes a job to disk; see :class:`Options` for the rest of the arguments.

    Raises Refused (nothing was touched), FailedUndone (the job runs on; ``fields["image"]`` where an image was
    committed all the same), and others with their exit codes.
    """
    check_names("checkpoint", options, Keywords.__annotations__)
    check_seconds(timeout=timeout, max_pause=options.get("max_pause"))
    chosen = Options(output=output, **options)
    which = job(like)
    started = time.monotonic()

    def once() -> CheckpointResult:
        with Work(
            "checkpoint", timeout=timeout, max_pause=chosen.max_pause, progress=progress, cancel=cancel, started=started
        ) as work:
            work.check()
            work.driver.start()  # it comes up while we look; the will needs it in any case
            with work.timed("plan", "looking"):
                find = functools.cache(find_criu)  # asked for twice
                prepared = look_at(which, work.driver, chosen, work, find)
                prepared.refuse()
                program = find(chosen.criu)
            kind = Dumping if prepared.box is None else ContainerDumping
            result = kind(work, CHECKPOINT, prepared, chosen, program).run()
        result.timings = work.timings
        return result

    return while_it_grows(once)
