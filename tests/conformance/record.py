"""What each call answered, written down as it comes: one JSON object a line, a file for each process that runs tests.

Switched on by LIMOSA_CONFORMANCE_RECORD=FOLDER. As a program it shows recordings::

    python tests/conformance/record.py FOLDER            how the tests went; of those that failed, every call
    python tests/conformance/record.py FOLDER PART…      every call of the tests whose ids have PART in them
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import defaultdict
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
            line = json.dumps({"test": self.test, "t": round(time.monotonic() - self._begin, 3), **said}, default=repr)
            with self._guard:
                self._file.write((line if len(line) < 4000 else line[:4000]) + "\n")
                self._file.flush()


def main(folder: str, parts: list[str]) -> None:
    calls: dict[str, list[dict[str, Any]]] = defaultdict(list)
    outcomes: dict[str, dict[str, Any]] = {}
    for path in sorted(Path(folder).glob("*.jsonl")):
        for line in path.read_text().splitlines():
            try:
                said = json.loads(line)
            except ValueError:
                continue
            if "outcome" in said:
                if outcomes.get(said["test"], {}).get("outcome") != "failed":
                    outcomes[said["test"]] = said
            else:
                calls[said["test"]].append(said)
    for test in sorted(outcomes):
        outcome = outcomes[test]
        if not (any(part in test for part in parts) if parts else outcome["outcome"] != "passed"):
            continue
        print(f"\n=== {test}: {outcome['outcome']} {outcome['seconds']} s\n{outcome.get('why', '')}")
        for said in calls[test]:
            name, *args = said["args"] if said["op"] in ("call", "raw", "nvml") else (said["op"], *said["args"])
            shown = json.dumps(args)
            value = json.dumps(said["value"])
            print(f"  {said['who']:12} {name}{shown[:160]} → {said['result']} {value[:160]} {said['s']:.4f} s")
    counted = defaultdict(int)
    for outcome in outcomes.values():
        counted[outcome["outcome"]] += 1
    print(dict(counted))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
