"""``restore``: an image becomes a running job again, under its old pids.

verify → criu restore → restore(map) → unlock; device memory that the image has as chunks comes beside (``loading.py``).
Everything that can be looked at is looked at before anything starts.
Until the job is seen running its image is the copy: what fails ends the half-restored tree and leaves the image as it
was.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from limosa.errors import Refused
from limosa.image import open_image
from limosa.operation import ports
from limosa.operation.options import RestoreOptions as Keywords
from limosa.operation.options import check_names, check_seconds
from limosa.operation.prepare import refuse_no_text
from limosa.operation.restore_options import Options
from limosa.operation.restore_plan import look
from limosa.operation.results import RestoreResult
from limosa.operation.steps.container_return import ContainerReturning
from limosa.operation.steps.returning import Checked, Returning
from limosa.operation.verbs import RESTORE
from limosa.operation.work import Work
from limosa.process.criu.find import find as find_criu
from limosa.progress import ProgressFn, silent

if TYPE_CHECKING:
    from typing_extensions import Unpack


def restore(
    image: str | os.PathLike[str],
    *,
    timeout: float | None = None,
    progress: ProgressFn = silent,
    cancel: threading.Event | None = None,
    **options: Unpack[Keywords],
) -> RestoreResult:
    """Brings a job back from its image; see :class:`Options` for the rest of the arguments.

    Returns once the job runs. Raises UntrustedImage or Refused: nothing was started; DamagedImage: the same, or its
    tree was ended again; NoRoomOnGpu: no room once CRIU had restored it: the tree was ended again, the image is the
    copy; others with their exit codes.
    """
    check_names("restore", options, Keywords.__annotations__)
    check_seconds(timeout=timeout)
    chosen = Options(**options)
    refuse_no_text(image)
    with (
        Work(RESTORE.name, timeout=timeout, progress=progress, cancel=cancel, brings_job=True) as work,
        open_image(image) as opened,
        Checked(work, opened, chosen.verify) as checked,
    ):
        work.driver.start()  # it comes up while we look; the will needs it in any case
        work.check()
        with work.timed("plan", "looking"):
            facts = look(opened.manifest, chosen, stop=work.stop_asked)
            contained = opened.manifest.container is not None
            if not contained:
                facts.reasons += [r for r in ports.in_the_way(opened.criu_fd) if r.refuses]
            work.check()
            if any(r.refuses for r in facts.reasons):
                checked.wait()  # a damaged image is the first thing to be told
                raise Refused(facts.reasons)
            program = facts.program or find_criu(chosen.criu)
        if not contained:
            ports.free(work, opened.criu_fd)
        if not opened.manifest.device:
            checked.wait_for_rest()
        kind = ContainerReturning if contained else Returning
        result = kind(work, RESTORE, opened, facts, chosen, program, checked).run()
    result.timings = work.timings
    return result
