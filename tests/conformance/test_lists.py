"""The lists beside the tests name tests that exist."""

from __future__ import annotations

import re
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


@pytest.mark.parametrize("place", UNSEEN)
def test_what_is_unseen_is_there(place: str) -> None:
    module, _, name = place.partition(".py::")
    assert any(test.startswith(name.partition("[")[0]) for test in written(module))
