"""The list of mutants still fits the code, and the tool that runs them tells what it should."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from mutants.__main__ import Copy, problems
from mutants.catalogue import MUTANTS, Mutant

TESTS = Path(__file__).parents[1]
HOLDS = ("tests/process/test_identity.py",)


def test_every_mutant_is_a_change_of_the_code_as_it_is_now():
    assert problems() == []
    assert len(MUTANTS) >= 40


def test_a_list_that_does_not_fit_is_told():
    good = MUTANTS[0]
    told = problems([good, good, good._replace(name="a", old="not there"), good._replace(name="b", tests=("tests/x",))])
    assert [line.partition(":")[0] for line in told] == [good.name, "a", "b"]


def test_the_page_tells_of_each_that_survives_with_a_reason():
    page = (
        (TESTS.parent / "docs/reliability.md")
        .read_text()
        .partition("survives, with a reason: ")[2]
        .partition("\n\n")[0]
    )
    told = dict(re.findall(r"`([a-z-]+)` \(([^)]*)\)", page))
    assert set(told) == {m.name for m in MUTANTS if m.reason}


@pytest.mark.timeout(300)
def test_a_mistake_is_found_in_a_copy_and_a_harmless_change_is_not(tmp_path):
    """What the tests of the copy import is the copy, also in programs that they start with ``-I``."""
    checkout = (TESTS.parent / "src/limosa/process/identity.py").read_bytes()
    tmp_path.chmod(0o755)
    copy = Copy(tmp_path)
    words = [copy.python, "-I", "-c", "import limosa; print(limosa.__file__)"]
    where = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout
    assert where.startswith(f"{tmp_path}/src/")
    wrong = next(m for m in MUTANTS if m.name == "pid-alone-is-a-process")
    found = copy.tried(wrong)
    assert (found.what, "test_identity.py" in found.by) == ("found", True), found.by
    harmless = Mutant("words", wrong.file, "Return whether this very process", "Whether this very process", "", HOLDS)
    assert copy.tried(harmless).what == "survives"
    broken = Mutant("no-python", wrong.file, "import os\n", "import os os\n", "", HOLDS)
    assert copy.tried(broken).what == "broken"
    assert (TESTS.parent / "src/limosa/process/identity.py").read_bytes() == checkout
    assert not any(str(tmp_path) in os.readlink(path) for path in Path("/proc").glob("[0-9]*/cwd") if _is_ours(path))


def _is_ours(path: Path) -> bool:
    try:
        return path.stat() is not None
    except OSError:
        return False
