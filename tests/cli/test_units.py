"""Sizes are told in KiB, MiB and GiB, everywhere; what ``ps`` says of moving is in words of a user's."""

from __future__ import annotations

import ast
import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import limosa
from limosa.cli import ps, words
from limosa.cli.main import VERBS
from limosa.errors import Reason
from limosa.operation.results import Ps
from limosa.process.memory import two

SOURCE = Path(limosa.__file__).parents[1]
DECIMAL = re.compile(r"(?<![A-Za-z])(?:[kKMGT]B|[KMGT]b|[kKMG]iB/sec|bytes/s|[kmg]ib)(?![A-Za-z])")
BINARY = re.compile(r"-?[0-9.]+ (?:B|KiB|MiB|GiB|TiB)")


def modules() -> list[Path]:
    """Those of both packages; where Limosa is installed others lie beside them."""
    return [path for package in ("limosa", "limosa_softgpu") for path in (SOURCE / package).rglob("*.py")]


def texts(path: Path) -> list[str]:
    """The texts of a module, without the docstrings that nobody is shown (a verb's are its help)."""
    tree = ast.parse(path.read_text())
    hidden = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if path.parent.name == "cli" and getattr(node, "name", "") in ("command", "callback"):
            continue
        for statement in node.body:  # also of attributes
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                hidden.add(id(statement.value))
    constants = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return [node.value for node in constants if id(node) not in hidden]


def test_no_text_that_people_see_counts_in_thousands() -> None:
    found = {
        f"{path.relative_to(SOURCE)}: {text[:80]!r}"
        for path in modules()
        for text in texts(path)
        if DECIMAL.search(text)
    }
    assert found == set()


def test_the_scan_finds_what_it_should(tmp_path: Path) -> None:
    for text in ("f'{n} MB free'", "'5 GB/s'", "'250kB'", "x = '10 MB'"):
        (tmp_path / "module.py").write_text(
            f'"""1 GB is no matter here."""\n{text if "=" in text else f"print({text})"}\n'
        )
        assert any(DECIMAL.search(one) for one in texts(tmp_path / "module.py")), text
    seen = [text for path in modules() for text in texts(path)]
    assert sum("MiB" in text or "GiB" in text for text in seen) > 10


def test_no_help_counts_in_thousands(inside: Any) -> None:
    for verb in ("", *VERBS):
        assert not DECIMAL.search(inside(*verb.split(), "--help").stdout), verb


@pytest.mark.parametrize("exponent", range(0, 50, 3))
def test_whatever_the_size_it_has_a_binary_unit(exponent: int) -> None:
    for number in (2**exponent - 1, 2**exponent, 3 * 2**exponent + 1, 10 ** min(exponent, 14)):
        said = words.size(number)
        assert BINARY.fullmatch(said), said
        value, unit = said.split()
        scale = {"B": 0, "KiB": 10, "MiB": 20, "GiB": 30, "TiB": 40}[unit]
        assert float(value) * 2**scale == pytest.approx(number, rel=0.06, abs=0.5)
    left, right = two(2**exponent, 2**exponent + 2 ** max(0, exponent - 12) + 1)
    assert left != right
    assert all(re.fullmatch(r"[0-9.,]+ (?:bytes|B|KiB|MiB|GiB|TiB)", one) for one in (left, right)), (left, right)
    assert re.fullmatch(r"[0-9.]+ GiB/s", words.rate(2**exponent))


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (2**30 - 1, "1.00 GiB"),
        ((1 << 30) - (1 << 18), "1.00 GiB"),
        ((1 << 30) - (1 << 20), "1023 MiB"),
        (2**40 - 1, "1.00 TiB"),
        (2**20 - 1, "1.00 MiB"),
        (1023, "1023 B"),
        (10 * 2**20 - 1, "10 MiB"),
        (9 * 2**20, "9.00 MiB"),
        (0, "0 B"),
    ],
)
def test_a_size_just_below_a_unit_is_told_in_that_unit(number: int, said: str) -> None:
    assert words.size(number) == said


REFUSED = [Reason(id="x", text="x", exit_code=13)]
WARNED = [Reason(id="x", text="x")]


@pytest.mark.parametrize(
    ("fields", "cell"),
    [
        ({"movable": True, "way": "parked"}, "fast"),
        ({"movable": True, "way": "driver"}, "slow"),
        ({"movable": False, "way": "parked", "reasons": REFUSED}, "no"),
        ({"movable": False, "way": "driver", "reasons": REFUSED}, "no"),
        ({"movable": False, "way": "", "reasons": REFUSED}, "no"),
        ({"movable": False, "way": "", "reasons": WARNED}, "-"),
    ],
)
def test_whether_a_job_moves_is_said_in_words_that_its_user_knows(fields: dict[str, Any], cell: str) -> None:
    out = io.StringIO()
    job = Ps(pid=7, user="ann", command=["train"], state="running", started_by_run=True, **fields)
    ps._draw(Console(file=out, width=120), [job], 0)
    head, line = (row.split() for row in out.getvalue().splitlines())
    assert "WAY" not in head
    assert line[head.index("MOVES")] == cell
    assert "parked" not in out.getvalue()
