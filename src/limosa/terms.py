"""The words that mean something here: what a job's state is called, what a suspend gives back, which way memory goes.

A word is also its text (``Release.ALL == "all"``), in JSON, in journals and in messages as well: whoever has or passes
plain text goes on as before. Limosa's own code compares words, never text.
"""

from __future__ import annotations

import enum


class Term(str, enum.Enum):
    """One of a few words. It is printed as its text by every version of Python, also in f-strings."""

    def __str__(self) -> str:
        return str(self.value)

    def __format__(self, spec: str) -> str:
        return format(str(self.value), spec)


class JobState(Term):
    """What is said of a job's state: the driver's words (:class:`limosa.gpu.State`) and Limosa's own."""

    RUNNING = "running"
    LOCKED = "locked"
    CHECKPOINTED = "checkpointed"
    FAILED = "failed"
    PARKED = "parked"
    """Its memory alone is suspended; the driver calls it running."""
    MIXED = "mixed"
    """Its processes are in several states."""
    GONE = "gone"
    """It has ended, or was not there before."""
    ENDED = "ended"
    """A checkpoint has ended it."""
    UNKNOWN = "unknown"


class Release(Term):
    """What a suspend gives back."""

    ALL = "all"
    MEMORY_ONLY = "memory-only"
    """The context stays where it is: the gate stays closed, and a resume takes milliseconds."""


class Route(Term):
    """Which way device memory goes, or how a job's state is held."""

    DRIVER = "driver"
    PARKED = "parked"
    HOST = "host"
    """There is no CUDA state: CRIU alone."""


class Verdict(Term):
    """What a plan comes to."""

    OK = "ok"
    REFUSED = "refused"
