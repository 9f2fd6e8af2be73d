"""What a campaign found: counts by operation, step, fault and victim, and a line to replay each failure."""

from __future__ import annotations

import sys
import time
from collections import Counter
from typing import Any

from campaign.cases import kind_of_fault


class Summary:
    """Takes results as they come; prints progress."""

    def __init__(self, planned: int, known: int, seed: int):
        self.planned, self.known, self.seed = planned, known, seed
        self.begun = time.monotonic()
        self.seconds = 0.0
        self.runs = self.idle = self.recovered = self.again = 0
        self.counts: dict[str, Counter[str]] = {
            k: Counter() for k in ("operation", "step", "fault", "victim", "exit code")
        }
        self.failures: list[dict[str, Any]] = []
        self._told = 0.0

    def add(self, result: dict[str, Any]) -> None:
        """One run."""
        operation, victim, step, fault = result["name"].split("/")
        self.runs += 1
        self.idle += not result.get("happened", True)
        self.recovered += result.get("recovered") is not None
        self.again += bool(result.get("again"))
        kinds = {
            "operation": operation,
            "step": kind_of_step(step),
            "fault": kind_of_fault(fault),
            "victim": victim,
            "exit code": str(result["rc"]),
        }
        for kind, value in kinds.items():
            self.counts[kind][value] += 1
        if result["problems"]:
            self.failures.append(result)
            print(f"FAILED {replay(result)}", *(f"    {p}"[:700] for p in result["problems"]), sep="\n", flush=True)
        if time.monotonic() - self._told > 5 or self.runs == self.planned:
            self._told = time.monotonic()
            rate = self.runs / (time.monotonic() - self.begun)
            left = (self.planned - self.runs) / rate
            print(
                f"{self.runs}/{self.planned} runs, {len(self.failures)} failed, {left:.0f} s left",
                file=sys.stderr,
                flush=True,
            )

    def end(self) -> None:
        """Says how it went."""
        self.seconds = time.monotonic() - self.begun
        print(f"{self.runs} runs in {self.seconds:.0f} s, {len(self.failures)} failed")
        for failure in self.failures:
            print(f"  {replay(failure)}")

    def json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "seed": self.seed,
            "cases known": self.known,
            "runs": self.runs,
            "seconds": round(self.seconds),
            "recovered by limosa recover": self.recovered,
            "same command again": self.again,
            "fault came too late to happen": self.idle,
            "failed": len(self.failures),
            "failures": [{**f, "replay": replay(f)} for f in self.failures],
            "counts": {kind: dict(sorted(found.items())) for kind, found in self.counts.items()},
        }

    def table(self) -> str:
        """For ``docs/reliability.md``."""
        lines = [f"{self.runs} runs, seed {self.seed}, {self.seconds:.0f} s, {len(self.failures)} failed.", ""]
        for kind, found in self.counts.items():
            told = ", ".join(f"{name} {count}" for name, count in sorted(found.items(), key=lambda i: (-i[1], i[0])))
            lines += [f"| by {kind} | {told} |"]
        return "\n".join(lines) + "\n"


def kind_of_step(step: str) -> str:
    """ "point", "call.lock", "nvml", "disk.write", "run"."""
    head, _, rest = step.partition(".")
    return head if head in ("point", "nvml", "run") else f"{head}.{rest.split('.')[0]}"


def replay(result: dict[str, Any]) -> str:
    """What to type to have it again."""
    return f"make faults CASE={result['name']} SEED={result['seed']}"
