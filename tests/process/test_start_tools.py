"""What the Makefile, ``scripts/`` and ``bench/`` start takes no code from where they are called, or from others."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STRANGER = 4242
# A Python, or what is one, in the Makefile and in shell scripts; and what follows it.
CALLED = re.compile(
    r"""(?:\$\(PY\)|\$\(abspath[ ]\$\(PY\)\)|"?\$PY"?|"?\$(?:\w*/)*python"?|"?\$candidate"?|\bpython3?)[ ]+(?=(.*))"""
)
IN_THE_CHECKOUT = "in the checkout (guarded), with the PYTHONPATH that scripts/own-folders has left"
MAY = {
    ("Makefile", "-m pytest"): IN_THE_CHECKOUT,
    ("Makefile", "-m campaign"): IN_THE_CHECKOUT,
    ("Makefile", "-m mutants"): IN_THE_CHECKOUT,
    ("Makefile", "-m zdtm"): IN_THE_CHECKOUT,
    ("Makefile", "bench/host.py"): "a file: its own folder is first",
    ("Makefile", "bench/driver.py"): "the same",
    ("Makefile", "bench/gpu.py"): "the same",
    ("test-gpu.sh", "-m pytest"): IN_THE_CHECKOUT,
    ("test-gpu.sh", "-m campaign"): IN_THE_CHECKOUT,
    ("test-gpu.sh", "-c"): IN_THE_CHECKOUT,
    ("test-gpu.sh", "tests/gpu/proofs.py"): "a file: its own folder is first",
}
FROM_PYTHON = {
    "bench/driver.py": "cwd=/",
    "bench/host.py": "cwd: the folder just made",
    "bench/jobs.py": "cwd: the folder just made",
    "bench/nccl_jobs.py": "cwd: the folder just made",
    "bench/nccl_rows.py": "cwd=/",
    "bench/rows.py": "cwd=/",
    "bench/sizes.py": "cwd: the folder just made",
    "scripts/picture.py": "in / and in a folder just made",
}


def lines_of(path: Path) -> list[str]:
    """The commands of a Makefile or a shell script: no comments, no text that is printed, continued lines as one."""
    text = re.sub(r"\\\n\s*", " ", path.read_text())
    text = re.sub(r"<<'END'.*?^END$", "", text, flags=re.DOTALL | re.MULTILINE)
    return [line.strip() for line in text.splitlines() if not re.match(r"\s*(#|@?echo |say |fail )", line)]


def calls(path: Path) -> list[str]:
    """What comes behind each Python that is started there."""
    found = []
    for line in lines_of(path):
        if re.match(r"(PY|python|venv)[ ]?:?=", line) or line.startswith(("for ", "if [ -x", "demo:")):
            continue
        if not line.startswith("/usr/local"):
            found += [m[1] for m in CALLED.finditer(line) if not m[1].startswith(("]", "&&"))]
    return found


IN_SCRIPTS = [p for p in sorted((ROOT / "scripts").iterdir()) if p.is_file()]
SCRIPTS = [ROOT / "Makefile", *(p for p in IN_SCRIPTS if p.read_bytes()[:2] == b"#!")]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_each_python_is_isolated_or_has_a_reason(path: Path) -> None:
    for call in calls(path):
        known = any(name == path.name and call.startswith(what) for name, what in MAY)
        assert call.startswith("-I ") or known, f"{path.name}: {call}"


def test_the_scan_finds_what_it_should(tmp_path: Path) -> None:
    seen = {path.name: len(calls(path)) for path in SCRIPTS}
    assert seen["Makefile"] > 10
    assert seen["bootstrap"] > 8
    assert seen["test-gpu.sh"] > 5
    for line in ("\t$(PY) -m x", '"$PY" x.py', '"$venv/bin/python" -m pip', "PYTHONPATH=x python3 -m y"):
        (tmp_path / "script").write_text(f"#!/bin/sh\n{line}\n")
        assert len(calls(tmp_path / "script")) == 1, line


def test_every_reason_is_needed() -> None:
    there = {(path.name, what) for path in SCRIPTS for call in calls(path) for _, what in MAY if call.startswith(what)}
    assert set(MAY) <= there


def modules_by_name() -> set[str]:
    """Tools in Python that start a Python with ``-m`` or ``-c`` and not isolated."""
    found = set()
    for path in [*(ROOT / "bench").glob("*.py"), *(ROOT / "scripts").glob("*.py"), ROOT / "native_build.py"]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.List) and len(node.elts) > 1 and ast.unparse(node.elts[0]) == "sys.executable":
                second = node.elts[1]
                if isinstance(second, ast.Constant) and second.value in ("-m", "-c"):
                    found.add(str(path.relative_to(ROOT)))
    return found


def test_tools_that_start_a_module_by_name_do_it_in_a_folder_of_their_own() -> None:
    assert modules_by_name() == set(FROM_PYTHON)


# --- what really happens -------------------------------------------------------------------------------------------


@pytest.fixture
def trap() -> Iterator[Path]:
    """A folder that another user has filled."""
    folder = Path(tempfile.mkdtemp(prefix="limosa-traps-"))
    (folder / ".venv" / "bin").mkdir(parents=True)
    (folder / "scripts").mkdir()
    for name in (".venv/bin/python", "scripts/bootstrap", "scripts/own-folders"):
        (folder / name).write_text(f"#!/bin/sh\n: > {folder}/sprung\n")
        (folder / name).chmod(0o755)
    (folder / "Makefile").write_text("")
    for name in ("limosa", "pytest", "json", "sitecustomize"):
        (folder / f"{name}.py").write_text(f"open({str(folder / 'sprung')!r}, 'w')\n")
    for path in (folder, *folder.rglob("*")):
        if os.geteuid() == 0:
            os.chown(path, STRANGER, STRANGER)
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


def made(*arguments: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    whole = {**os.environ, **env}
    for name in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS"):
        whole.pop(name, None)
    return subprocess.run(
        ["make", *arguments], cwd=cwd, env=whole, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("target", ["demo", "lint", "help"])
def test_make_by_name_from_another_folder_starts_nothing_there(trap: Path, target: str) -> None:
    done = made("-f", str(ROOT / "Makefile"), target, cwd=trap)
    assert done.returncode == 2
    assert "in the folder of this Makefile" in done.stderr
    assert not (trap / "sprung").exists()


def test_make_keeps_of_pythonpath_what_is_ones_own(trap: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir(mode=0o755)
    link = tmp_path / "link"
    link.symlink_to(trap)
    given = f":.:tests:{trap}:{link}:{own}::/nowhere:{tmp_path}/own/../own:"
    shown = 'shown:; @echo "$$PYTHONPATH|$$PYTHONHOME|$$PYTHONSTARTUP"'
    done = made("-s", "--eval", shown, "shown", cwd=ROOT, PYTHONPATH=given, PYTHONSTARTUP=f"{trap}/limosa.py")
    assert done.stdout == f"{own}:{tmp_path}/own/../own||\n", done.stderr
    done = made("-s", "--eval", shown, "shown", cwd=ROOT, PYTHONPATH="")
    assert done.stdout == "||\n"


def test_the_tests_on_gpus_keep_of_pythonpath_what_is_ones_own(trap: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir(mode=0o755)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$PYTHONPATH" >> {tmp_path}/seen\n')
    python.chmod(0o755)
    env = {**os.environ, "PY": str(python), "OUT": str(tmp_path), "COMMIT": "none", "PYTHONHOME": str(trap)}
    env["PYTHONPATH"] = f"{own}::.:{trap}"
    argv = [str(ROOT / "scripts" / "test-gpu.sh"), "--", "nothing"]
    subprocess.run(argv, cwd=trap, env=env, capture_output=True, timeout=60, check=True)
    seen = set((tmp_path / "seen").read_text().splitlines())
    assert seen == {f"{ROOT}/src:{own}"}
    assert not (trap / "sprung").exists()


def test_benchmarks_hand_on_no_relative_folder(tmp_path: Path) -> None:
    for name in ("driver", "gpu"):
        code = f"import os, sys; sys.path.insert(0, {str(ROOT / 'bench')!r}); import {name}; "
        code += "print(os.environ['PYTHONPATH'])"
        env = {**os.environ, "PYTHONPATH": f":.:x:{tmp_path}"}
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=True
        )
        assert set(done.stdout.strip().split(":")) == {f"{ROOT}/src", str(tmp_path)}
