"""What can be done to jobs: plain, thread-safe functions with ``timeout=``, ``progress=`` and ``cancel=``.

A job is a process and all its descendants that hold CUDA state (or, for images, all its descendants). None of these
functions installs a signal handler or prints; each raises a :class:`limosa.errors.LimosaError` whose exit code tells
what state the job is in. A verb's module is loaded when the verb is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from limosa.on_demand import on_demand

if TYPE_CHECKING:
    from limosa.operation.checkpoint import checkpoint as checkpoint
    from limosa.operation.ending import stop as stop
    from limosa.operation.ending import wait as wait
    from limosa.operation.jobs import Job as Job
    from limosa.operation.jobs import resolve as resolve
    from limosa.operation.move import move as move
    from limosa.operation.move import resume as resume
    from limosa.operation.move import suspend as suspend
    from limosa.operation.move import toggle as toggle
    from limosa.operation.move import worst_exit_code as worst_exit_code
    from limosa.operation.plan import plan as plan
    from limosa.operation.plan import plan_restore as plan_restore
    from limosa.operation.ps import ps as ps
    from limosa.operation.recover import recover as recover
    from limosa.operation.remove_image import remove_image as remove_image
    from limosa.operation.restore import restore as restore

_WHERE = {
    "Job": "jobs",
    "checkpoint": "checkpoint",
    "move": "move",
    "plan": "plan",
    "plan_restore": "plan",
    "ps": "ps",
    "recover": "recover",
    "remove_image": "remove_image",
    "resolve": "jobs",
    "restore": "restore",
    "resume": "move",
    "stop": "ending",
    "suspend": "move",
    "toggle": "move",
    "wait": "ending",
    "worst_exit_code": "move",
}

__all__ = list(_WHERE)

on_demand(__name__)
