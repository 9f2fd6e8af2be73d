"""docs/environment.md names the variables that the code reads, and no others."""

from __future__ import annotations

import re
from pathlib import Path

PROJECT = Path(__file__).parents[2]
INTERNAL = {
    "LIMOSA_RESIDENT_TELLS",  # from one process of Limosa's to the next
    "LIMOSA_DEMO_WHY",
    "LIMOSA_CRIU_RETRY",  # told to the CRIU plugin
    "LIMOSA_LOCKS",
    "LIMOSA_ASK",  # told to CRIU's action script
    "LIMOSA_ANSWER",
}


def test_every_variable_is_documented() -> None:
    page = (PROJECT / "docs/environment.md").read_text()
    documented = {name for row in re.findall(r"^\| (`.*?) \|", page, re.M) for name in re.findall(r"`(\w+)`", row)}
    python = "\n".join(path.read_text() for path in (PROJECT / "src/limosa").rglob("*.py"))
    native = "\n".join(path.read_text() for path in (PROJECT / "src/limosa/native").rglob("*.c"))
    read = {name for name in re.findall(r"""["'](LIMOSA_\w+)["']""", python) if not name.endswith("_")}
    read |= set(re.findall(r'getenv\("(LIMOSA_\w+)"', native))
    read |= set(re.findall(r"""(?:environ\.get|user_folder)\(["'](XDG_\w+)["']""", python))
    assert len(read) > 12
    assert read - INTERNAL == {name for name in documented if name.startswith(("LIMOSA_", "XDG_"))}
