"""The frame of all fuzzers: how many cases, with which seeds, and what each of them may cost.

::

    def test_whatever_a_reply_says_is_a_shim_error(fuzz):
        for case in fuzz.cases():
            data = mutated(case.random, SAMPLES)
            with case, contextlib.suppress(ShimError):
                decode(data)

An exception that comes out of ``with case`` fails the test and says how to run that case alone. So does a case that
hangs (it is interrupted), and one that grows the process by more than ``megabytes``; a few may be slow, as a machine
may hold up anybody, and no more. After the last one no descriptor, thread or child may be left. ``LIMOSA_FUZZ`` is the
number of cases of a test (2,000), half of them with the fixed seed 1 and half with a new one; ``LIMOSA_FUZZ_SEED=S``
runs all of them with that seed, and ``LIMOSA_FUZZ_CASE=N`` only the N-th.

With Hypothesis the same: ``@examples`` above ``@given(…)``, and the fixture ``nothing_left``.
"""

from __future__ import annotations

import gc
import os
import random
import resource
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any, TypeVar

FIXED = 1
WARM = 50
"""Cases after which what a process loads once (modules, caches) is there."""
HANGS = 10
"""A case that has taken so many times as long as it may hangs."""
MOST_SLOW = 3
"""Of all cases of a test."""


def count() -> int:
    """How many cases a test runs."""
    return int(os.environ.get("LIMOSA_FUZZ", "2000"))


def seeds() -> list[int]:
    """The seeds of this run, the fixed one first."""
    given = os.environ.get("LIMOSA_FUZZ_SEED")
    return [int(given)] if given else [FIXED, secrets.randbits(32) | 1 << 32]


class Hung(BaseException):
    """A case has not ended in time. No Exception: code under test must not take it for one of its own errors."""


class Case:
    """One case: a context manager around what is tried.

    Attributes:
        seed, number: what makes it this one.
        random: its own source of randomness: a case is the same when it is run alone.
        limit: seconds by which it is slow.
    """

    def __init__(self, seed: int, number: int, limit: float):
        self.seed, self.number, self.limit = seed, number, limit
        self.random = random.Random(f"{seed}/{number}")
        self.seconds = 0.0
        self._begin = 0.0

    def __enter__(self) -> Case:
        self._before = signal.signal(signal.SIGALRM, self._late)
        self._begin = time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, HANGS * self.limit)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._before)
        self.seconds = time.monotonic() - self._begin
        if error is not None:
            self.tell(repr(error)[:500])

    def tell(self, what: str) -> None:
        """Says how to have this case again; pytest shows it with the failure."""
        sys.stderr.write(
            f"case {self.number}: {what}\nagain: LIMOSA_FUZZ_SEED={self.seed} LIMOSA_FUZZ_CASE={self.number}\n"
        )

    def _late(self, _number: int, _frame: FrameType | None) -> None:
        raise Hung(f"not answered after {HANGS * self.limit} s")


class Fuzz:
    """What the fixture ``fuzz`` gives to a test."""

    def cases(self, limit: float = 5.0, megabytes: int = 64, share: float = 1.0) -> Iterator[Case]:
        """Yields the cases, and checks what each of them and all of them together have cost.

        Args:
            limit: seconds for one case; a few may take longer.
            megabytes: by how much the process may ever grow, behind the first cases.
            share: of the number of cases: less for cases that start a process each.
        """
        chosen = seeds()
        alone = os.environ.get("LIMOSA_FUZZ_CASE")
        each = max(WARM + 10, int(count() * share) // len(chosen))
        sys.stderr.write(f"seeds: {' '.join(map(str, chosen))}\n")
        state = Left()
        peak, slow = None, 0
        for seed in chosen:
            for number in [int(alone)] if alone else range(each):
                case = Case(seed, number, limit)
                yield case
                if case.seconds > limit:
                    slow += 1
                    case.tell(f"took {case.seconds:.1f} s")
                    assert slow <= MOST_SLOW, "several cases have taken too long"
                most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
                if number == WARM:
                    state, peak = Left(), peak or most
                if peak is not None and most > peak + megabytes:
                    case.tell(f"grew the process from {peak} to {most} MiB")
                    raise AssertionError("a case has taken too much memory")
        state.check()


class Left:
    """What a process has open and under way, to be compared later."""

    def __init__(self) -> None:
        self._before = self._look()

    def check(self, seconds: float = 60.0) -> None:
        """Fails where there is more than before; what is just ending is given a moment."""
        end = time.monotonic() + seconds
        while True:
            gc.collect()
            now = self._look()
            more = {what: sorted(now[what] - self._before[what]) for what in now if now[what] - self._before[what]}
            if not more:
                return
            if time.monotonic() > end:
                raise AssertionError(f"left: {more}")
            time.sleep(0.02)

    @staticmethod
    def _look() -> dict[str, set[str]]:
        descriptors = set()
        for name in os.listdir("/proc/self/fd"):
            try:
                descriptors.add(f"{name} -> {os.readlink(f'/proc/self/fd/{name}')}")
            except OSError:
                pass  # the listing's own
        threads = {f"{t.name} {t.native_id}" for t in threading.enumerate()}
        children = set()
        for thread in os.listdir("/proc/self/task"):
            try:
                with open(f"/proc/self/task/{thread}/children") as file:
                    children |= set(file.read().split())
            except OSError:
                pass
        return {"descriptors": descriptors, "threads": threads, "children": children}


_Test = TypeVar("_Test", bound=Callable[..., Any])


def examples(test: _Test) -> _Test:
    """Makes a test of Hypothesis run as many examples as ``LIMOSA_FUZZ`` says, with seeds as above."""
    from hypothesis import HealthCheck, Phase, seed, settings

    chosen = seeds()[-1]
    found = settings(
        max_examples=count(),
        deadline=5000,
        database=None,
        phases=[Phase.explicit, Phase.generate, Phase.shrink],
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
        print_blob=True,
    )
    return found(seed(chosen)(test))  # type: ignore[no-any-return]
