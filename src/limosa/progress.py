"""What a long operation tells its caller while it works; drawing it is the caller's business."""

from __future__ import annotations

from collections.abc import Callable

import msgspec


class Progress(msgspec.Struct, frozen=True):
    """One message about an operation under way.

    Attributes:
        step: the step's name ("lock", "checkpoint", "dump", "hash", "verify", "restore", "unlock", "undo" …).
        done: bytes done so far, or None where it is not known.
        total: bytes in all, or None where it is not known.
        message: a sentence for people, or "".
    """

    step: str
    done: int | None = None
    total: int | None = None
    message: str = ""


ProgressFn = Callable[[Progress], None]
"""Called from the operation's thread; must return quickly and not raise."""


def silent(_: Progress) -> None:
    """A progress function that says nothing."""
