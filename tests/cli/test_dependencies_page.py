"""docs/dependencies.md says why each package is there; what is required is imported somewhere in the package."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

PROJECT = Path(__file__).parents[2]
PAGE = (PROJECT / "docs/dependencies.md").read_text()
SETTINGS = (PROJECT / "pyproject.toml").read_text()
IMPORTED_AS = {"cuda-bindings": "cuda", "nvidia-ml-py": "pynvml"}


def required(key: str) -> set[str]:
    block = re.search(rf"^{key} = \[(.*?)\]$", SETTINGS, re.M | re.S)
    assert block is not None
    return set(re.findall(r'"([A-Za-z][\w-]*)[^"]*"', block[1]))


def imported() -> set[str]:
    found = set()
    for path in (PROJECT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found.add((node.module or "").partition(".")[0])
    return found - set(sys.stdlib_module_names)


def test_every_dependency_has_its_line_and_no_other_has() -> None:
    runtime, tests = PAGE.split("For tests")
    assert set(re.findall(r"`([\w-]+)`", "".join(re.findall(r"^\| (`.*?) \|", runtime, re.M)))) == required(
        "dependencies"
    )
    assert set(re.findall(r"`([\w-]+)`", "".join(re.findall(r"^\| (`.*?) \|", tests, re.M)))) == required("test")


def test_what_is_required_is_imported() -> None:
    assert {IMPORTED_AS.get(name, name) for name in required("dependencies")} <= imported()
