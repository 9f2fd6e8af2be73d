"""docs/architecture.md and the pages beside the code name every module, and the levels that lint-imports holds."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
SOURCE = PROJECT / "src/limosa"
SOFTGPU = PROJECT / "src/limosa_softgpu"
PAGE = (PROJECT / "docs/architecture.md").read_text()
OF_THEIR_OWN = ("gpu", "process", "parking", "operation", "operation/steps", "operation/parked")  # each has a table
IN_A_ROW = ("image", "cli", "process/hazards", "process/criu")


def named(text: str) -> set[str]:
    return set(re.findall(r"`(\w+\.py)`", text))


def told_of(room: str) -> str:
    """What is said of a room: its table on the page beside its code, or its row in one."""
    first, _, inner = room.partition("/")
    beside = SOURCE / first / "DESIGN.md"
    if room in OF_THEIR_OWN:
        heading = f"## `{inner}/`\n" if inner else "## Modules\n"
        return beside.read_text().partition(heading)[2].partition("\n## ")[0]
    page = beside.read_text() if inner else PAGE
    (row,) = re.findall(rf"^\| `{inner or first}/` .*$", page, re.M)
    return row


def verbs() -> set[str]:
    """The verbs' own modules, which the page does not list."""
    tree = ast.parse((SOURCE / "cli/main.py").read_text())
    (made,) = [n.value for n in tree.body if isinstance(n, ast.AnnAssign) and ast.unparse(n.target) == "VERBS"]
    return {module.rpartition(".")[2] + ".py" for module, _ in ast.literal_eval(made).values()}


@pytest.mark.parametrize("room", [*OF_THEIR_OWN, *IN_A_ROW])
def test_every_module_of_a_room_is_named(room: str) -> None:
    there = (
        {path.name for path in (SOURCE / room).glob("*.py")} - {"__init__.py"} - (verbs() if room == "cli" else set())
    )
    families = {name for name in there if name.startswith("doctor")} if "`doctor*.py`" in told_of(room) else set()
    assert there - families - named(told_of(room)) == set()


def test_every_module_above_the_rooms_is_named() -> None:
    assert {path.name for path in SOURCE.glob("*.py")} - {"__init__.py"} - named(PAGE) == set()


def test_every_module_of_the_software_gpu_is_named() -> None:
    table = (SOFTGPU / "DESIGN.md").read_text()
    assert {path.name for path in SOFTGPU.glob("*.py")} - {"__init__.py"} == named(table)


def test_what_is_named_is_there() -> None:
    designs = [*SOURCE.glob("*/DESIGN.md"), SOFTGPU / "DESIGN.md"]
    pages = PAGE + "".join(path.read_text() for path in designs)
    assert named(pages) - {path.name for folder in (SOURCE, SOFTGPU) for path in folder.rglob("*.py")} == set()


def test_the_levels_are_those_that_are_checked() -> None:
    contract = (PROJECT / "pyproject.toml").read_text().partition("layers = [")[2].partition("\n]")[0]
    checked = [re.findall(r"(?:limosa\.)?\b(\w+)\b(?!\.)", line) for line in re.findall(r'"(.*?)"', contract)]
    (levels,) = re.findall(r"The levels, from below:(.*?)\. Packages of", PAGE, re.S)
    assert [set(re.findall(r"`(\w+)`", level)) for level in levels.split("·")] == [
        set(level) for level in reversed(checked)
    ]
