"""The lists beside the tests name tests that exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from conformance.unseen import UNSEEN

HERE = Path(__file__).parent


def written(module: str) -> set[str]:
    """The tests that a module has."""
    return set(re.findall(r"^def (test_\w+)", (HERE / f"{module}.py").read_text(), re.MULTILINE))


def test_every_test_that_the_readme_names_is_there() -> None:
    for line in (HERE / "README.md").read_text().splitlines():
        module = ""
        for named, name in re.findall(r"`(?:(test_\w+)(?:::))?(test_\w+\*?)`?", line):
            module = named or module or name
            if name == module:
                assert (HERE / f"{name}.py").exists(), name
            else:
                assert any(re.fullmatch(name.replace("*", ".*"), test) for test in written(module)), (module, name)


TOPICS = tuple(f"| {topic}: " for topic in ("calls", "maps", "harm", "outside", "caveats"))


def test_every_fact_of_the_readme_has_a_test_or_a_reason() -> None:
    rows = [line for line in (HERE / "README.md").read_text().splitlines() if line.startswith(TOPICS)]
    assert len(rows) > 50
    for row in rows:
        _, _, where, _ = row.split("|")
        assert "test_" in where or re.match(r" not provoked( here)?: \S+", where), row


def test_the_readme_tells_how_many_checks_there_are() -> None:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-n", "0", "-p", "no:cacheprovider", str(HERE)]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    found = re.search(r"conformance: (\d+) checks in (\d+) tests", said)
    assert found, said[-500:]
    assert int(found[1]) >= 250
    assert f"**{found[1]} checks**" in (HERE / "README.md").read_text()


@pytest.mark.parametrize("place", UNSEEN)
def test_what_is_unseen_is_there(place: str) -> None:
    module, _, name = place.partition(".py::")
    assert any(test.startswith(name.partition("[")[0]) for test in written(module))
