"""Which of CRIU's tests apply to a host without namespaces, and why the others do not.

A test's ``.desc`` is a Python literal that says where it runs (``flavor``: h is the host), what of the kernel it needs
(``feature``: asked of CRIU itself), which programs (``deps``), and what CRIU is to be told (``opts``, ``dopts``,
``ropts``). ``NAME.checkskip`` is asked as well.
"""

from __future__ import annotations

import ast
import functools
import os
import platform
import re
import subprocess
from pathlib import Path

import msgspec

from limosa.process.criu.find import find

# CRIU's options that Limosa has a word for (value: its own for the dump and for the restore), or gives by itself.
_SAME = ("--tcp-established", "--tcp-close", "--file-locks", "--shell-job")
_DUMP = ("--link-remap", "--ghost-limit", "--ext-unix-sk", "--skip-in-flight")
_BY_ITSELF = ("--network-lock nftables", "--manage-cgroups=ignore", "--no-ghost-fiemap", "--ghost-fiemap")


class Options(msgspec.Struct, frozen=True):
    """What a test wants CRIU to be told, and what that is for Limosa."""

    dump: list[str] = []
    restore: list[str] = []
    limosa_dump: list[str] = []
    limosa_restore: list[str] = []
    unknown: str = ""


class Test(msgspec.Struct, frozen=True):
    """One test: ``kind`` is "static" or "transition"."""

    kind: str
    name: str
    flags: list[str] = []
    options: Options = Options()
    timeout: int = 30
    skip: str = ""
    """Why it does not apply, or ""."""

    @property
    def alone(self) -> bool:
        """Whether nothing may run beside it: it says so, or works on terminals, whose numbers are the machine's."""
        return "excl" in self.flags or self.name.startswith(("pty", "tty"))

    @property
    def label(self) -> str:
        return self.name if self.kind == "static" else f"{self.kind}/{self.name}"


def read(zdtm: Path, kind: str) -> list[Test]:
    """Every test of a kind that CRIU's Makefile builds here."""
    listed = subprocess.run(
        ["make", "--no-print-directory", "-C", zdtm / kind, "-f", "-", "names"],
        input="include Makefile\nnames:\n\t@echo NAMES: $(TST)\n",
        capture_output=True, text=True, timeout=120, check=True,
    ).stdout  # fmt: skip
    names = next(line for line in listed.splitlines() if line.startswith("NAMES:")).split()[1:]
    return [_test(zdtm, kind, name) for name in sorted(set(names))]


def _test(zdtm: Path, kind: str, name: str) -> Test:
    file = zdtm / kind / f"{name}.desc"
    try:
        desc = ast.literal_eval(file.read_text().strip()) if file.exists() else {}
    except (ValueError, SyntaxError):
        return Test(kind, name, skip="its description is a program")
    flags = desc.get("flags", "").split()
    options = _options(desc)
    return Test(
        kind, name, flags, options, int(desc.get("timeout") or 30), _skip(zdtm / kind / name, desc, flags, options)
    )


def _options(desc: dict[str, str]) -> Options:
    found = Options()
    for words, dump, restore in (
        (desc.get("opts", ""), True, True),
        (desc.get("dopts", ""), True, False),
        (desc.get("ropts", ""), False, True),
    ):
        bare = words.split()
        found.dump.extend(bare if dump else [])
        found.restore.extend(bare if restore else [])
        for option in re.findall(r"--\S+(?:\s+[^-]\S*)?", words):
            name = option.split()[0]
            if option in _BY_ITSELF:
                continue
            if name in _SAME or name in _DUMP:
                found.limosa_dump.extend(option.split() if dump else [])
                found.limosa_restore.extend(option.split() if restore and name in _SAME else [])
            else:
                found = msgspec.structs.replace(found, unknown=option)
    return found


def _skip(test: Path, desc: dict[str, str], flags: list[str], options: Options) -> str:
    if "h" not in desc.get("flavor", "h ns uns").split():
        return "runs in namespaces of its own only"
    if "noauto" in flags:
        return "CRIU's own run leaves it out"
    if "arch" in desc and platform.machine() not in desc["arch"].split():
        return "of another architecture"
    lacking = [name for name in desc.get("feature", "").split() if not _feature(name)]
    if lacking:
        return f"the kernel or CRIU lacks {lacking[0]}"
    for dep in desc.get("deps", []):
        if not any(os.access(path, os.X_OK) or os.path.exists(path) for path in dep.split("|")):
            return f"needs {dep.split('|')[0]}"
    check = test.with_name(f"{test.name}.checkskip")
    if os.access(check, os.X_OK):
        asked = subprocess.run([check], cwd=test.parents[2], capture_output=True, timeout=60, check=False)
        if asked.returncode:
            return "its own check says that it cannot run here"
    return f"asks CRIU for {options.unknown}" if options.unknown else ""


@functools.cache
def _feature(name: str) -> bool:
    asked = subprocess.run(
        [*find().argv, "check", "--feature", name], capture_output=True, cwd="/", timeout=60, check=False
    )
    return asked.returncode == 0
