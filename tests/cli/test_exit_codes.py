"""docs/exit-codes.md says of every error, and of every refusal, what its exit code is."""

from __future__ import annotations

import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import limosa
from limosa import errors

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "exit-codes.md").read_text()
ROWS = {
    int(code): set(re.findall(r"`([a-z-]+)`", ids))
    for code, ids in re.findall(r"^\| (\d+) \| ([^|]*) \|", PAGE, re.MULTILINE)
}


RUN = range(125, 128)  # told in a paragraph of their own
MANY = {12, 13}  # the page leads to docs/refusals.md for those
PROGRAMS = ("_main", "trampoline", "trial_victim")
NO_IDS = {"run", "stop", "wait"}  # verbs
NOT_TOLD = {"network"}  # whoever clears up after CRIU goes on without it


def every(kind: type[errors.LimosaError]) -> set[type[errors.LimosaError]]:
    return {kind}.union(*(every(k) for k in kind.__subclasses__()))


for _, module, _ in pkgutil.walk_packages(limosa.__path__, "limosa."):
    if re.match(r"limosa\.(gpu|process|image|parking|operation)\.", module) and not module.endswith(PROGRAMS):
        importlib.import_module(module)
CODES = {
    (kind.id, kind.exit_code)
    for kind in every(errors.LimosaError)
    if kind.exit_code not in RUN and kind.id not in NOT_TOLD
}
CODES.add(("stopped", 1))  # cli/signals.py
REFUSALS = {
    (name, int(code))
    for name, codes in re.findall(r"^\| `([a-z-]+)` \| ([0-9, ]+) \|", (DOCS / "refusals.md").read_text(), re.MULTILINE)
    for code in codes.split(",")
}


@pytest.mark.parametrize("code", sorted(ROWS))
def test_a_codes_row_has_its_ids_and_no_others(code):
    mine, refusals = ({name for name, its in ids if its == code} for ids in (CODES, REFUSALS))
    assert mine - ROWS[code] == set()
    assert ROWS[code] - NO_IDS - mine - refusals == set()
    if code not in MANY:
        assert refusals - ROWS[code] == set()


def test_what_is_met_often_has_the_code_that_it_has():
    rows = re.findall(r"^\| (`[^|]*) \| [^|]* \| ([0-9, ]+) \|", PAGE.partition("often met:")[2], re.MULTILINE)
    assert len(rows) > 8
    for ids, codes in rows:
        for name in re.findall(r"`([a-z-]+)`", ids):
            assert {int(code) for code in codes.split(",")} & {its for id_, its in REFUSALS if id_ == name}, name


def test_the_codes_of_the_design_are_there():
    assert set(ROWS) == {0, 1, 2, *range(10, 25), 40, 41, 75}
    for code in RUN:
        assert str(code) in PAGE
