"""What the two benchmarks share: the machine in a line, files for the results, PASS or MISS."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"


def commit() -> str:
    """The commit that is measured: $COMMIT, else git's, with a mark where files were changed since."""
    given = os.environ.get("COMMIT", "")
    if given:
        return given
    try:
        command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
        found = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return found.stdout.strip() or "unknown"


def machine() -> dict[str, Any]:
    """Kernel, processor, cores, memory."""
    model = ""
    with open("/proc/cpuinfo") as file:
        model = next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), "")
    with open("/proc/meminfo") as file:
        memory = int(next(line for line in file if line.startswith("MemTotal")).split()[1]) * 1024
    return {
        "kernel": platform.release(),
        "processor": model or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**30),
        "python": platform.python_version(),
        "load": os.getloadavg()[0],
        "nice": os.nice(0),
    }


def verdict(ok: bool) -> str:
    """The word for a line of the table."""
    return "PASS" if ok else "MISS"


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table in Markdown."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


class Results:
    """Raw figures, written to ``docs/results/<name>-<date>.json`` after every one, and a page beside it at the end."""

    def __init__(self, name: str, out: str | None = None):
        folder = Path(out) if out else RESULTS
        folder.mkdir(parents=True, exist_ok=True)
        self.date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")
        self.path = folder / f"{name}-{self.date}.json"
        self.raw: dict[str, Any] = {"date": self.date, "commit": commit(), "machine": machine(), "runs": []}

    def add(self, **figures: Any) -> None:
        """One more run; on disk at once, so that a run that is cut short has its figures."""
        self.raw["runs"].append(figures)
        self.save()

    def save(self) -> None:
        """Write the raw figures."""
        self.path.write_text(json.dumps(self.raw, indent=1) + "\n")

    def page(self, text: str) -> Path:
        """Write the page."""
        self.save()
        path = self.path.with_suffix(".md")
        path.write_text(text.rstrip("\n") + "\n")
        return path
