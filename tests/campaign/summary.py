"""What a campaign found: counts by operation, step, fault and victim, and a line to replay each failure.

Every run is kept with its name, so that a part of a campaign that was cut off is worth what it had run: it is written
every half minute, later parts leave out what it names (``--without``), and several are made one (``--merge``).
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from campaign.cases import Case, key_of, kind_of_fault

WRITTEN_EVERY = 30.0  # seconds


class Summary:
    """Takes results as they come; prints progress; writes itself.

    Args:
        planned: how many runs there will be.
        known: every case that there is, to tell how much of it was run.
        seed: that of the runs.
        path: where it is written, with a table beside it.
    """

    def __init__(self, planned: int, known: Iterable[Case], seed: int, path: Path | None = None):
        self.planned, self.seed, self.path = planned, seed, path
        self.known = {key_of(case) for case in known}
        self.begun = time.monotonic()
        self.seconds = 0.0
        self.runs: list[dict[str, Any]] = []
        self._told = 0.0
        self._written = time.monotonic()

    def add(self, result: dict[str, Any]) -> None:
        """One run."""
        kept = {key: result[key] for key in ("name", "seed", "rc") if key in result}
        kept["seconds"] = round(result["seconds"], 1)
        kept |= {key: result[key] for key in ("recovered", "again") if result.get(key) is not None}
        if not result.get("happened", True):
            kept["idle"] = True
        if result["problems"]:
            kept |= {key: result[key] for key in ("problems", "at", "short", "stderr", "said") if key in result}
            print(f"FAILED {replay(result)}", *(f"    {p}"[:700] for p in result["problems"]), sep="\n", flush=True)
        self.runs.append(kept)
        self.seconds = time.monotonic() - self.begun
        if time.monotonic() - self._told > 5 or len(self.runs) == self.planned:
            self._told = time.monotonic()
            left = (self.planned - len(self.runs)) * self.seconds / len(self.runs)
            print(
                f"{len(self.runs)}/{self.planned} runs, {len(self.failures)} failed, {left:.0f} s left",
                file=sys.stderr,
                flush=True,
            )
        if time.monotonic() - self._written > WRITTEN_EVERY:
            self.write()

    def add_replay(self, result: dict[str, Any]) -> None:
        """A run that had failed was run once more, with nothing else at its side: which of the two is told."""
        for run in self.runs:
            if (run["name"], run["seed"]) == (result["name"], result["seed"]) and run.get("problems"):
                run["replayed alone"] = "failed again" if result["problems"] else "right"
                print(f"replayed alone, {run['replayed alone']}: {replay(run)}", flush=True)
                for problem in result["problems"]:
                    print(f"    {problem}"[:700], flush=True)

    @property
    def failures(self) -> list[dict[str, Any]]:
        """Runs that failed, but for those that were right when they were replayed alone."""
        return [run for run in self.runs if run.get("problems") and run.get("replayed alone") != "right"]

    @property
    def once(self) -> list[dict[str, Any]]:
        """Runs that failed and were right when they were replayed alone."""
        return [run for run in self.runs if run.get("replayed alone") == "right"]

    def to_replay(self) -> list[tuple[Case, int]]:
        """Runs that have failed and were not replayed."""
        left = [run for run in self.failures if "replayed alone" not in run]
        return [(Case.named(run["name"]), run["seed"]) for run in left]

    def end(self) -> None:
        """Says how it went."""
        once = f", {len(self.once)} more only beside others" if self.once else ""
        print(f"{len(self.runs)} runs in {self.seconds:.0f} s, {len(self.failures)} failed{once}")
        for failure in self.failures:
            print(f"  {replay(failure)}")
        self.write()

    def write(self) -> None:
        """Writes what there is now, in place of what was there."""
        self._written = time.monotonic()
        if self.path is None:
            return
        for path, text in (
            (self.path, json.dumps(self.json(), indent=0) + "\n"),
            (self.path.with_suffix(".md"), self.table()),
        ):
            new = path.with_name(f".{path.name}.new")
            new.write_text(text)
            os.replace(new, path)

    def counts(self) -> dict[str, Counter[str]]:
        """How many runs there were of what."""
        found: dict[str, Counter[str]] = {
            kind: Counter() for kind in ("operation", "step", "fault", "victim", "exit code")
        }
        for run in self.runs:
            case = Case.named(run["name"])
            kinds = {
                "operation": case.operation,
                "step": kind_of_step(case.step),
                "fault": kind_of_fault(case.fault),
                "victim": case.victim,
                "exit code": "killed" if run["rc"] == -9 else str(run["rc"]),
            }
            for kind, value in kinds.items():
                found[kind][value] += 1
        return found

    def json(self) -> dict[str, Any]:
        """For programs."""
        covered = {key_of(Case.named(run["name"])) for run in self.runs}
        return {
            "seed": self.seed,
            "runs": len(self.runs),
            "seconds": round(self.seconds),
            "operation, step and fault": {"known": len(self.known), "run": len(covered & self.known)},
            "recovered by limosa recover": sum("recovered" in run for run in self.runs),
            "same command again": sum(bool(run.get("again")) for run in self.runs),
            "fault came too late to happen": sum(bool(run.get("idle")) for run in self.runs),
            "failed": len(self.failures),
            "failed once, right when replayed alone": len(self.once),
            "failures": [{**run, "replay": replay(run)} for run in self.failures],
            "counts": {kind: dict(sorted(found.items())) for kind, found in self.counts().items()},
            "each run": self.runs,
        }

    def table(self) -> str:
        """For ``docs/reliability.md``: operations by kinds of step, then one line for each of the other kinds."""
        told, counts = self.json(), self.counts()
        steps = sorted(counts["step"], key=lambda step: (-counts["step"][step], step))
        both = Counter((c.operation, kind_of_step(c.step)) for c in (Case.named(run["name"]) for run in self.runs))
        of = told["operation, step and fault"]
        lines = [
            f"{len(self.runs)} runs, seed {self.seed}, {self.seconds:.0f} s: {of['run']} of {of['known']} (operation, "
            f"step, fault), {told['recovered by limosa recover']} needed `limosa recover`, "
            f"{told['same command again']} times the same command was run again without the fault, in "
            f"{told['fault came too late to happen']} the fault came too late to happen. {len(self.failures)} failed, "
            f"{len(self.once)} failed beside others and were right when they were replayed alone.",
            "",
            "| operation | " + " | ".join(steps) + " | all |",
            "|---" * (len(steps) + 2) + "|",
        ]
        for operation in sorted(counts["operation"]):
            row = [str(both[operation, step] or "") for step in steps]
            lines.append(f"| {operation} | " + " | ".join(row) + f" | {counts['operation'][operation]} |")
        row = [str(counts["step"][step]) for step in steps]
        lines += ["| all | " + " | ".join(row) + f" | {len(self.runs)} |", "", "| by | runs |", "|---|---|"]
        for kind in ("fault", "victim", "exit code"):
            listed = sorted(counts[kind].items(), key=lambda item: (-item[1], item[0]))
            lines.append(f"| {kind} | " + ", ".join(f"{name} {count}" for name, count in listed) + " |")
        lines += ["", *(f"- {replay(run)}: {run['problems']}"[:400] for run in self.failures)]
        lines += [f"- once, right alone: {replay(run)}: {run['problems']}"[:400] for run in self.once]
        return "\n".join(lines).rstrip() + "\n"


def merged(paths: Iterable[Path], known: Iterable[Case], path: Path | None = None) -> Summary:
    """Several parts as one. A run that is in two of them counts once, as the later one has it."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    seconds, seeds = 0.0, set()
    for one in paths:
        told = json.loads(one.read_text())
        seconds += told["seconds"]
        for run in told["each run"]:
            found[run["name"], run["seed"]] = run
            seeds.add(run["seed"])
    whole = Summary(len(found), known, min(seeds, default=0), path)
    whole.runs, whole.seconds = list(found.values()), seconds
    return whole


def names_in(path: Path) -> set[str]:
    """The cases that a summary, or a plain list of names, says were run."""
    told = json.loads(path.read_text())
    return {run["name"] for run in told["each run"]} if isinstance(told, dict) else set(told)


def kind_of_step(step: str) -> str:
    """ "point", "call.lock", "inside.lock", "nvml", "disk.write", "hazard", "run"."""
    head, _, rest = step.partition(".")
    if head == "inside":
        return f"{head}.{rest.split('-')[0]}"
    return f"{head}.{rest.split('.')[0]}" if head in ("call", "disk") else head


def replay(result: dict[str, Any]) -> str:
    """What to type to have it again."""
    return f"make faults CASE={result['name']} SEED={result['seed']}"
