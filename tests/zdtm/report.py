"""What came of the tests, and a page of it: what was counted, each difference, and the tests that do not apply."""

from __future__ import annotations

import collections
import datetime
import os
import platform
import re
import statistics
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from limosa.process.criu.find import find

if TYPE_CHECKING:
    from zdtm.suite import Test


class Outcome(msgspec.Struct, frozen=True):
    """How it went.

    ``how``: "pass"; "refused" (the job lives on), "broken" (refused, and the job does not live on), "lost" (written and
    ended, and not brought back), "wrong" (brought back, and the test says FAIL); "start" (it does not even start).
    """

    how: str
    why: str = ""
    dump: float = 0.0
    restore: float = 0.0


class Result(msgspec.Struct, frozen=True):
    """What came of one test."""

    label: str
    generations: int
    bare: Outcome
    limosa: Outcome

    @property
    def same(self) -> bool:
        """Whether Limosa brings back what bare CRIU does."""
        return self.limosa.how == "pass" or self.bare.how != "pass"


def commit() -> str:
    """Which Limosa this is: git's word, "-dirty" behind it where something was changed since."""
    argv = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True).stdout.strip()


def page(tests: Sequence[Test], unbuilt: Mapping[str, str], results: Sequence[Result], why: Mapping[str, str]) -> str:
    """The page.

    Args:
        tests: every test there is.
        unbuilt: those that cannot be built here, with the reason.
        results: what came of the others.
        why: for tests that differ, the reason in words.
    """
    kernel = ".".join(platform.release().split(".")[:2])
    both = [r for r in results if r.bare.how == "pass"]
    differ = [r for r in both if r.limosa.how != "pass"]
    neither = [r for r in results if r.bare.how != "pass"]
    return "\n".join(
        [
            f"# CRIU's own tests through Limosa, {datetime.date.today().isoformat()}",
            "",
            f"`make test-zdtm` at commit {commit()} with CRIU {find().version} on Linux {kernel}, {os.cpu_count()} "
            "cores. Each test was started, written to disk, ended, brought back and asked whether all is as it was: "
            "by bare CRIU with the options that the test asks for, and by `limosa checkpoint` and `limosa restore` "
            "with the same.",
            "",
            "| | tests |",
            "|---|---|",
            f"| in CRIU's Makefile: static, transition | {_kinds(t.kind for t in tests)} |",
            "| that apply to a host without namespaces ([why the others do not](#tests-that-do-not-apply)) "
            f"| {_kinds(t.kind for t in tests if not t.skip)} |",
            *([f"| that cannot be built here | {len(unbuilt)} |"] if unbuilt else []),
            f"| run | {len(results)} |",
            f"| that bare CRIU brings back | {len(both)} |",
            f"| **of these, Limosa too** | **{len(both) - len(differ)}** |",
            *(f"| {word} | {n} |" for word, n in collections.Counter(r.limosa.how for r in differ).items()),
            f"| through two generations, by both | {_twice(both)} |",
            f"| that bare CRIU does not bring back here | {len(neither)} |",
            "",
            *_times(both),
            "## Differences",
            "",
            *(_rows(differ, why) if differ else ["None."]),
            "",
            "## Where bare CRIU fails",
            "",
            "*start*: the test does not start on this machine. *refused*: the job runs on; what Limosa knows it says "
            "in its own words, and what it does not know CRIU refuses, which is undone. *lost*, *wrong*: CRIU's own.",
            "",
            "| test | bare CRIU | Limosa |",
            "|---|---|---|",
            *(f"| {r.label} | {_said(r.bare)} | {_said(r.limosa)} |" for r in neither),
            "",
            "## Tests that do not apply",
            "",
            "| why | tests |",
            "|---|---|",
            *(f"| {text} | {n} |" for text, n in collections.Counter(t.skip for t in tests if t.skip).most_common()),
            *(f"| cannot be built: {text} | {name} |" for name, text in unbuilt.items()),
            "",
        ]
    )


def _kinds(kinds: Iterable[str]) -> str:
    found = collections.Counter(kinds)
    return f"{found['static']}, {found['transition']}"


def _twice(both: Sequence[Result]) -> str:
    twice = [r for r in both if r.generations > 1]
    return f"{sum(r.limosa.how == 'pass' for r in twice)} of {len(twice)}"


def _times(both: Sequence[Result]) -> list[str]:
    once = [r for r in both if r.generations == 1 and r.limosa.how == "pass"]
    if not once:
        return []
    medians = [
        f"{statistics.median(getattr(getattr(r, way), step) for r in once):.3f} s"
        for way in ("bare", "limosa")
        for step in ("dump", "restore")
    ]
    return [
        f"Median of {len(once)} tests, side by side, each step a command of its own: "
        f"bare CRIU {medians[0]} and {medians[1]}, Limosa {medians[2]} and {medians[3]}.",
        "",
    ]


def _rows(differ: Sequence[Result], why: Mapping[str, str]) -> list[str]:
    rows = (f"| {r.label} | {_said(r.limosa)} | {why.get(r.label, '')} |" for r in differ)
    return ["| test | Limosa | why |", "|---|---|---|", *rows]


def _said(outcome: Outcome) -> str:
    return f"{outcome.how}: {short(outcome.why)}" if outcome.why else outcome.how


def short(why: str) -> str:
    """A reason without pids and folders, on one line of a table."""
    text = re.sub(r" \(log: [^)]*\)|[^\s(]*/test/zdtm/|\S*\d\d:\d\d\.\d+: +\d+: ", "", why)
    text = re.sub(r"\b(0x)?[0-9a-f]*\d[0-9a-f]{2,}\b", "N", text)
    return text.replace("|", "/").replace("\n", " ")[:220]
