"""docs/refusals.md and the code name the same hazards, with the same exit codes."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from limosa.operation.options import FORCEABLE

PROJECT = Path(__file__).parents[2]
HAZARDS = [
    *(PROJECT / "src/limosa/process/hazards").glob("*.py"),
    PROJECT / "src/limosa/process/memory.py",
]
PLANS = [
    *(PROJECT / "src/limosa/operation").glob("*.py"),
    *(PROJECT / "src/limosa/operation/communicators").glob("*.py"),
    PROJECT / "src/limosa/process/launch.py",
    PROJECT / "src/limosa/process/records.py",
    PROJECT / "src/limosa/job.py",
]


def documented() -> dict[str, tuple[str, str]]:
    """id → (exit code, whether it can be forced)."""
    found = {}
    for line in (PROJECT / "docs/refusals.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if re.fullmatch(r"`[a-z-]+`", cells[0]):
            assert cells[0] not in found
            found[cells[0].strip("`")] = (cells[1], cells[2])
    return found


def reasons(paths: list[Path]) -> list[tuple[str, int | None, bool | None]]:
    """(id, exit code, forceable) of each Reason that is made there; None where it is worked out."""
    found = []
    for path in paths:
        tree = ast.parse(path.read_text())
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") in ("Reason", "refuse", "_refuse"):
                given = {word.arg: word.value for word in call.keywords}
                name = given.get("id") or call.args[0]
                if not isinstance(name, ast.Constant):
                    continue  # the helper's own Reason, or an error turned into one
                own = getattr(call.func, "id", "") == "Reason"
                code, force = given.get("exit_code"), given.get("forceable")
                exit_code = (code.value if isinstance(code, ast.Constant) else None) if code else 0 if own else 13
                forced = (force.value if isinstance(force, ast.Constant) else None) if force else False if own else None
                found.append((name.value, exit_code, forced))
    return found


def test_every_hazard_is_documented_with_its_exit_code_and_whether_it_can_be_forced():
    page = documented()
    assert len(page) > 50
    for id_, exit_code, forceable in reasons(HAZARDS):
        assert id_ in page, f"docs/refusals.md lacks {id_}"
        written, force = page[id_]
        if exit_code:
            assert written == str(exit_code), id_
        if forceable is not None and exit_code:
            assert (force == "yes") == forceable, id_


def test_every_finding_of_the_planner_is_documented():
    page = documented()
    for id_, exit_code, forceable in reasons(PLANS):
        assert id_ in page, f"docs/refusals.md lacks {id_}"
        written, force = page[id_]
        if exit_code is not None:
            noted = id_ == "no-cuda-state" and not exit_code  # ``ps`` says it of jobs that nobody wants to move
            assert noted or str(exit_code or "–") in written, id_
        if exit_code and id_ != "nccl-ranks":  # only what is seen from outside can be forced: the page says so
            assert (force == "yes") == forceable, id_


def test_what_force_takes_is_what_the_page_says():
    assert {id_ for id_, (_, force) in documented().items() if force not in ("no", "")} == FORCEABLE


def test_nothing_is_documented_that_no_code_says():
    source = "\n".join(path.read_text() for path in (PROJECT / "src").rglob("*.py"))
    for id_ in documented():
        assert f'"{id_}"' in source, id_
