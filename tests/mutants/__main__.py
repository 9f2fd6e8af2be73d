"""Applies each mutant of ``catalogue.py`` in a private copy of the tree and runs the tests that must notice it.

python -m mutants                       all of them; a table at the end, exit code 1 where one survives
python -m mutants --only NAME NAME      these (a name, or a part of it)
python -m mutants --side 2              two copies side by side
python -m mutants --table FILE          writes the table there
python -m mutants --check               only whether every old text is there, once

The checkout is never touched. A copy has an environment of its own in which Limosa is the copy: programs that tests
start find it there as well, also with ``python -I``. What is in C is compiled anew where its source is mutated. First
the tests run on a copy without a mutant: what fails there shows nothing.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from surroundings import as_usual

from mutants.catalogue import MUTANTS, Mutant

PROJECT = Path(__file__).resolve().parents[2]
LIMIT = 400.0
"""Seconds that the tests of one mutant may take. Each test has a limit of its own: what hangs fails there."""


class Outcome(NamedTuple):
    """What became of a mutant: "found", "survives", or "broken" (its tests show nothing, or not in time)."""

    mutant: Mutant
    what: str
    seconds: float
    by: str


def problems(mutants: Iterable[Mutant] = MUTANTS, project: Path = PROJECT) -> list[str]:
    """What is wrong with the list itself: texts that are not in their file exactly once, tests that are not there."""
    found = []
    names = set()
    for mutant in mutants:
        if mutant.name in names:
            found.append(f"{mutant.name}: named twice")
        names.add(mutant.name)
        path = project / mutant.file
        times = path.read_text().count(mutant.old) if path.is_file() else 0
        if times != 1:
            found.append(f"{mutant.name}: its old text is {times} times in {mutant.file}")
        if mutant.old == mutant.new:
            found.append(f"{mutant.name}: changes nothing")
        for test in mutant.tests:
            file, _, function = test.partition("::")
            if not (project / file).exists():
                found.append(f"{mutant.name}: there is no {file}")
            elif function and f"def {function.partition('[')[0]}(" not in (project / file).read_text():
                found.append(f"{mutant.name}: there is no {test}")
    return found


class Copy:
    """A copy of the tree with a Python environment in which Limosa is this copy."""

    def __init__(self, folder: Path):
        self.folder = folder
        listed = subprocess.run(
            ["git", "-C", str(PROJECT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            capture_output=True, check=True, timeout=60,
        ).stdout.decode()  # fmt: skip
        built = PROJECT.glob("src/**/*.so*")
        for name in [*filter(None, listed.split("\0")), *(str(path.relative_to(PROJECT)) for path in built)]:
            if (PROJECT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(PROJECT / name, folder / name)  # with its times: what was built is not built again
        self.python = self._environment()
        self.build()

    def _environment(self) -> str:
        home = self.folder / ".venv"
        packages = Path(sysconfig.get_path("purelib", vars={"base": str(home), "platbase": str(home)}))
        packages.mkdir(parents=True)
        for there in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
            for entry in Path(there).iterdir():
                if "limosa" not in entry.name and not (packages / entry.name).exists():
                    (packages / entry.name).symlink_to(entry)
        for entry in Path(sysconfig.get_path("purelib")).glob("limosa-*.dist-info"):
            (packages / entry.name).symlink_to(entry)
        (packages / "limosa_copy.pth").write_text(f"{self.folder / 'src'}\n")
        for entry in Path(sys.prefix).iterdir():  # a CRIU that lies there, above all
            if entry.name not in ("bin", "lib", "lib64", "pyvenv.cfg"):
                (home / entry.name).symlink_to(entry)
        (home / "bin").mkdir()
        base = Path(sys.base_prefix) / "bin"
        (home / "pyvenv.cfg").write_text(f"home = {base}\ninclude-system-site-packages = false\n")
        python = home / "bin" / "python"
        python.symlink_to(Path(sys.executable).resolve())
        for name in ("limosa", "torchrun"):
            if (script := Path(sys.executable).with_name(name)).exists():
                text = script.read_text().splitlines(keepends=True)
                (home / "bin" / name).write_text("".join([f"#!{python}\n", *text[1:]]))
                (home / "bin" / name).chmod(0o755)
        return str(python)

    def run(self, tests: Sequence[str], limit: float = LIMIT) -> tuple[int | None, str]:
        """Runs tests; returns pytest's exit code, None where it took too long, and its last words."""
        words = ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", "--timeout=60"]
        env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "LIMOSA_FUZZ": "300"}
        process = subprocess.Popen(
            [self.python, *words, *tests],
            cwd=self.folder, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, start_new_session=True,
        )  # fmt: skip
        try:
            said, _ = process.communicate(timeout=limit)
            return process.returncode, said
        except subprocess.TimeoutExpired:
            return None, ""
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
            self._end_what_is_left()

    def _end_what_is_left(self) -> None:
        """A mutant may leave anything: every process that runs this copy's Python is ended."""
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                words = Path(f"/proc/{name}/cmdline").read_bytes()
                environment = Path(f"/proc/{name}/environ").read_bytes()
                if f"{self.folder}/".encode() in words + environment and int(name) != os.getpid():
                    os.kill(int(name), signal.SIGKILL)
            except (OSError, ProcessLookupError):
                pass

    def build(self) -> None:
        """Compiles what is older than its source."""
        subprocess.run(
            [self.python, "native_build.py"], cwd=self.folder, capture_output=True, timeout=300, check=True,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        )  # fmt: skip

    def tried(self, mutant: Mutant) -> Outcome:
        """Applies one, runs its tests, takes it back."""
        path = self.folder / mutant.file
        text, begin = path.read_text(), time.monotonic()
        path.write_text(text.replace(mutant.old, mutant.new))
        try:
            if path.suffix in (".c", ".h"):
                self.build()
            code, said = self.run(mutant.tests)
        finally:
            path.write_text(text)
            if path.suffix in (".c", ".h"):
                self.build()
        what = {0: "survives", 1: "found"}.get(-1 if code is None else code, "broken")
        failed = [line for line in said.splitlines() if line.startswith(("FAILED", "ERROR"))]
        failed = failed or (["FAILED a test that hung"] if what == "found" else [])
        by = failed[0].split(" - ")[0].split(" ", 1)[1].rpartition("/")[2] if failed else ""
        if what == "broken":
            by = said[-2000:]
        return Outcome(mutant, what, time.monotonic() - begin, by)


def table(outcomes: Sequence[Outcome]) -> str:
    """As it stands in a page."""
    found = sum(o.what == "found" for o in outcomes)
    commit = subprocess.run(
        ["git", "-C", str(PROJECT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    lines = [
        f"# Mutants, {time.strftime('%Y-%m-%d', time.gmtime())}",
        "",
        f"`make mutants`, commit {commit}, {os.cpu_count()} cores, Linux {platform.release().partition('-')[0]}, "
        f"Python {platform.python_version()}: {found} of {len(outcomes)} found. Each is one mistake in a copy of the "
        "tree. Behind it: the test that noticed it first, and after how many seconds (with the start of pytest, and "
        "with compiling where the mistake is in C).",
        "",
        "| mutant | in | what it would do | noticed by | s |",
        "|---|---|---|---|---|",
    ]
    for one in outcomes:
        by = {"found": f"`{one.by}`", "survives": f"**nobody**: {one.mutant.reason}"}
        where = one.mutant.file.removeprefix("src/limosa/")
        lines.append(
            f"| {one.mutant.name} | `{where}` | {one.mutant.hurts} | {by.get(one.what, one.what)} | {one.seconds:.0f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="mutants", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME")
    parser.add_argument("--side", type=int, default=1, metavar="N")
    parser.add_argument("--table", type=Path)
    parser.add_argument("--check", action="store_true")
    parser.add_argument(
        "--no-baseline", action="store_true", help="take it as known that the tests pass without mutants"
    )
    chosen = parser.parse_args()
    as_usual()
    picked = [m for m in MUTANTS if not chosen.only or any(part in m.name for part in chosen.only)]
    if wrong := problems(picked):
        print("\n".join(wrong))
        return 2
    if chosen.check:
        print(f"{len(picked)} mutants")
        return 0
    with tempfile.TemporaryDirectory(prefix="limosa-mutants-") as top:
        os.chmod(top, 0o755)  # other users' parts of a test read it
        copies: SimpleQueue[Copy] = SimpleQueue()
        for n in range(max(1, min(chosen.side, len(picked)))):
            copies.put(Copy(Path(top) / str(n)))
        if not chosen.no_baseline:
            copy = copies.get()
            code, said = copy.run(sorted({test for m in picked for test in m.tests}), limit=1800)
            if code != 0:
                print(said[-5000:])
                print("these tests fail without a mutant")
                return 2
            copies.put(copy)

        def one(mutant: Mutant) -> Outcome:
            copy = copies.get()
            try:
                outcome = copy.tried(mutant)
            finally:
                copies.put(copy)
            print(f"{outcome.what:9} {mutant.name} ({outcome.seconds:.0f} s) {outcome.by}", flush=True)
            return outcome

        with ThreadPoolExecutor(max(1, chosen.side)) as pool:
            outcomes = list(pool.map(one, picked))
    if chosen.table:
        chosen.table.write_text(table(outcomes))
    unexplained = [o for o in outcomes if o.what == "broken" or (o.what == "survives" and not o.mutant.reason)]
    print(f"{sum(o.what == 'found' for o in outcomes)} of {len(outcomes)} found")
    return int(bool(unexplained))


if __name__ == "__main__":
    sys.exit(main())
