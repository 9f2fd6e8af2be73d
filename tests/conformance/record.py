"""What each call answered, written down as it comes: one JSON object a line, a file for each process that runs tests.

Switched on by LIMOSA_CONFORMANCE_RECORD=FOLDER. As a program it shows recordings::

    python tests/conformance/record.py FOLDER            how the tests went; of those that failed, every call
    python tests/conformance/record.py FOLDER PART…      every call of the tests whose ids have PART in them
    python tests/conformance/record.py --compare A B     calls that ended otherwise in B than in A, test by test
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

FOLDER = os.environ.get("LIMOSA_CONFORMANCE_RECORD")


class Recording:
    """Writes lines to this process's file; does nothing where no folder is given."""

    def __init__(self) -> None:
        self.test = ""
        self._guard = threading.Lock()
        self._begin = time.monotonic()
        self._file = None
        if FOLDER:
            os.makedirs(FOLDER, exist_ok=True)
            name = os.environ.get("PYTEST_XDIST_WORKER", "main")
            self._file = open(Path(FOLDER) / f"{name}.jsonl", "a")  # noqa: SIM115 - open as long as this process

    def __call__(self, said: dict[str, Any]) -> None:
        if self._file is not None:
            args = said.get("args", [])
            if len(repr(args)) > 3000:  # a module
                said = {**said, "args": [*args[:1], "…"]}
            line = json.dumps({"test": self.test, "t": round(time.monotonic() - self._begin, 3), **said}, default=repr)
            with self._guard:
                self._file.write(line + "\n")
                self._file.flush()


def read(folder: str) -> tuple[dict[str, list[dict[str, Any]]], dict[str, dict[str, Any]]]:
    """The calls of each test, and how each test went."""
    calls: dict[str, list[dict[str, Any]]] = defaultdict(list)
    outcomes: dict[str, dict[str, Any]] = {}
    for path in sorted(Path(folder).glob("*.jsonl")):
        for line in path.read_text().splitlines():
            try:
                said = json.loads(line)
            except ValueError:
                continue  # a line that was cut off
            said["test"] = said["test"].partition("@")[0]  # xdist adds the group's name
            if "outcome" not in said:
                calls[said["test"]].append(said)
            elif outcomes.get(said["test"], {}).get("outcome") != "failed":
                outcomes[said["test"]] = said
    return calls, outcomes


def name_of(said: dict[str, Any]) -> str:
    return str(said["args"][0]) if said["op"] in ("call", "raw", "nvml") else str(said["op"])


def show(folder: str, parts: list[str]) -> None:
    calls, outcomes = read(folder)
    for test, outcome in sorted(outcomes.items()):
        if not (any(part in test for part in parts) if parts else outcome["outcome"] != "passed"):
            continue
        print(f"\n=== {test}: {outcome['outcome']} {outcome['seconds']} s\n{outcome.get('why', '')}")
        for said in calls[test]:
            args = json.dumps(said["args"][1:] if said["op"] in ("call", "raw", "nvml") else said["args"])
            value = json.dumps(said["value"])
            print(f"  {said['who']:12} {name_of(said)}{args[:160]} → {said['result']} {value[:160]} {said['s']:.4f} s")
    print(dict(Counter(outcome["outcome"] for outcome in outcomes.values())))


def compare(first: str, second: str) -> None:
    """Show the first call of each test that ended otherwise; calls are matched by who makes which, in order."""
    (ours, _), (theirs, _) = read(first), read(second)
    for test in sorted(ours.keys() & theirs.keys()):
        for who in sorted({said["who"] for said in ours[test]} - {"controller", "pooled", "work"}) + SHARED:
            pairs = zip(
                *([said for said in calls[test] if said["who"] == who] for calls in (ours, theirs)), strict=False
            )
            for mine, other in pairs:
                if name_of(mine) != name_of(other):
                    break  # set up in another order: what several tests share was made at another time
                if mine["result"] != other["result"]:
                    print(f"{test}: {who} {name_of(mine)}: {mine['result']} and {other['result']}")
                    break


SHARED = ["controller", "pooled", "work"]

if __name__ == "__main__":
    if sys.argv[1] == "--compare":
        compare(*sys.argv[2:4])
    else:
        show(sys.argv[1], sys.argv[2:])
