"""docs/exit-codes.md says of every error what its exit code is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from limosa import errors

PAGE = (Path(__file__).parents[2] / "docs" / "exit-codes.md").read_text()
ROWS = {
    int(code): set(re.findall(r"`([a-z-]+)`", ids))
    for code, ids in re.findall(r"^\| (\d+) \| ([^|]*) \|", PAGE, re.MULTILINE)
}


def every(kind: type[errors.LimosaError]) -> set[type[errors.LimosaError]]:
    return {kind}.union(*(every(k) for k in kind.__subclasses__()))


ERRORS = {k.id: k for k in every(errors.LimosaError) if k.__module__ == "limosa.errors" and k.id}
RUN = range(125, 128)  # told in a paragraph of their own


@pytest.mark.parametrize("name", sorted(i for i, k in ERRORS.items() if k.exit_code not in RUN))
def test_every_exit_code_is_documented(name):
    assert ERRORS[name].exit_code in ROWS


@pytest.mark.parametrize("code", sorted(ROWS))
def test_every_id_is_in_its_codes_row(code):
    wrong = {i: ERRORS[i].exit_code for i in ROWS[code] if i in ERRORS and ERRORS[i].exit_code != code}
    assert not wrong


def test_the_codes_of_the_design_are_there():
    assert set(ROWS) == {0, 1, 2, *range(10, 25), 40, 41, 75}
    for code in RUN:
        assert str(code) in PAGE
