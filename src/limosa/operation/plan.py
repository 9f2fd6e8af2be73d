"""``plan``: what a verb would do, and what stands against it."""

from __future__ import annotations

import os
from typing import Any

from limosa import gpu
from limosa.errors import UsageError
from limosa.operation import checkpoint_plan, move_plan, restore_plan
from limosa.operation.jobs import JobLike, job
from limosa.operation.prepare import Where
from limosa.operation.results import Plan


def plan(verb: str, like: JobLike, **options: Any) -> Plan:
    """What a verb would do to a job, and what stands against it. Touches nothing.

    Args:
        verb: "move", "suspend", "resume", "toggle" or "checkpoint".
        like: the job.
        **options: the verb's own (``to``, ``source``, ``gpu_map``, ``force``; for checkpoint ``output``,
            ``leave_running`` and CRIU's).

    Raises:
        NoSuchProcess: there is no such job.
        UsageError: no such verb or option.
    """
    which = job(like)
    driver = gpu.Driver()
    try:
        if verb == "checkpoint":
            return checkpoint_plan.look_at(which, driver, checkpoint_plan.Options(**options)).as_plan()
        if verb not in ("move", "suspend", "resume", "toggle"):
            raise UsageError(detail=f"no plan for {verb!r}: move, suspend, resume, toggle or checkpoint")
        where = Where(**{k: options.pop(k, None) for k in ("to", "source", "gpu_map")})
        force, limit = options.pop("force", ()), options.pop("max_pause", None)
        release = options.pop("release", "all") if verb == "suspend" else "all"
        if options:
            raise UsageError(detail=f"{verb} has no option {', '.join(options)}")
        return move_plan.look_at(verb, which, driver, where, force=force, max_pause=limit, release=release).as_plan()
    finally:
        driver.close()


def plan_restore(image: str | os.PathLike[str], **options: Any) -> Plan:
    """What restoring an image would do, and what stands against it. Touches nothing.

    Args:
        image: the folder of the image.
        **options: the verb's own (:class:`limosa.operation.restore_plan.Options`).

    Raises:
        LimosaError: it is no image that can be read.
    """
    return restore_plan.look_at(image, restore_plan.Options(**options))
