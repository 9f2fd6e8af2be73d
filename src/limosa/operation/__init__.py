"""What can be done to jobs: plain, thread-safe functions with ``timeout=``, ``progress=`` and ``cancel=``.

A job is a process and all its descendants that hold CUDA state (or, for images, all its descendants). None of these
functions installs a signal handler or prints; each raises a :class:`limosa.errors.LimosaError` whose exit code tells
what state the job is in.
"""

from __future__ import annotations

from limosa.operation.checkpoint import checkpoint
from limosa.operation.ending import stop, wait
from limosa.operation.jobs import Job, resolve
from limosa.operation.move import move, resume, suspend, toggle, worst_exit_code
from limosa.operation.plan import plan, plan_restore
from limosa.operation.ps import ps
from limosa.operation.recover import recover
from limosa.operation.remove_image import remove_image
from limosa.operation.restore import restore

__all__ = [
    "Job",
    "checkpoint",
    "move",
    "plan",
    "plan_restore",
    "ps",
    "recover",
    "remove_image",
    "resolve",
    "restore",
    "resume",
    "stop",
    "suspend",
    "toggle",
    "wait",
    "worst_exit_code",
]
