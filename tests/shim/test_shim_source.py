"""How the C of what jobs run under is written: each file says in a header of its own what it has for others."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from limosa.native.build import CRIU, HASH, SHIM, SIGHT, compilers

FOLDERS = (CRIU, HASH, SHIM, SIGHT)
BY_ASSEMBLER = {"shim_answer", "shim_dlsym_answer", "shim_real_dlsym", "shim_real_dlvsym"}
LEAVES = re.compile(r"\b(?:goto|break|continue|if|while|switch|return)\b")


def files(suffix: str) -> list[Path]:
    return sorted(path for folder in FOLDERS for path in folder.glob(f"*{suffix}"))


def macros(path: Path) -> dict[str, str]:
    """Name → what stands for it."""
    text = re.sub(r"/\*.*?\*/", "", path.read_text(), flags=re.S).replace("\\\n", " ")
    return dict(re.findall(r"^[ \t]*#[ \t]*define (\w+)(.*)$", text, re.M))


@pytest.mark.parametrize("source", files(".c"), ids=lambda path: path.name)
def test_what_others_use_is_declared_in_the_files_own_header(source: Path, tmp_path: Path) -> None:
    made = tmp_path / "made.o"
    flags = [
        "-std=gnu11",
        "-D_GNU_SOURCE",
        "-DHASH_LIBRARY",
        "-fPIC",
        "-fvisibility=hidden",
        "-w",
        "-c",
        "-o",
        str(made),
    ]
    subprocess.run([*compilers()[0], *flags, str(source)], check=True, timeout=60)
    said = subprocess.run(["readelf", "-sW", made], capture_output=True, text=True, check=True).stdout
    symbols = [line.split() for line in said.splitlines() if re.match(r"\s+\d+: ", line)]
    hidden = {s[7] for s in symbols if s[4:6] == ["GLOBAL", "HIDDEN"] and s[6] != "UND"} - BY_ASSEMBLER
    header = source.with_suffix(".h")
    if source.name == "limosa_plugin.c":
        header = CRIU / "plugin.h"
    there = header.read_text() if header.exists() else ""
    assert {name for name in hidden if not re.search(rf"\b{name}\b", there)} == set()
    foreign = set(re.findall(r"^(?!static|typedef|extern)\w[\w* ]*?\b(\w+)\(.*\);", there, re.M))
    assert foreign - {s[7] for s in symbols if s[6] != "UND"} == set(), "another file's functions"


def test_macros_do_not_leave_for_their_caller() -> None:
    """One that makes a whole function may hand on; what it decides is in a function."""
    found = {
        (path.name, name)
        for path in [*files(".c"), *files(".h")]
        for name, body in macros(path).items()
        if LEAVES.search(re.sub(r"\{\s*(?:[^{};]*;)*?\s*return [^;]*;\s*\}\s*$", "", body))
    }
    assert found == {("chunk_hash.c", "TILE_FUNCTION")}, "which makes a function for each kind of processor"


def test_nothing_is_done_by_a_condition_that_nobody_looks_at() -> None:
    """No ``a ? f() : g();`` and no ``a && f();``."""
    statement = re.compile(
        r"(?:(?<=[;{}]\n)|(?<=[;{}]\n\n)|(?<=\*/\n))[ \t]+([\w.>\[\]()!*& -]+?) (?:\?|&&|\|\|) [^;{}]*;$", re.M
    )
    found = [
        (path.name, whole[0].strip())
        for path in files(".c")
        for whole in statement.finditer(path.read_text())
        if all(whole[1].count(a) == whole[1].count(b) for a, b in ("()", "[]")) and not whole[1].startswith("return")
    ]
    assert found == []
