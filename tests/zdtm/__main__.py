"""Runs CRIU's tests both ways: ``python -m zdtm`` in ``tests``, as root; ``make test-zdtm``."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import msgspec
from support import own_network

from zdtm import report, source, suite
from zdtm.play import both
from zdtm.report import Result
from zdtm.suite import Test

_PR_SET_CHILD_SUBREAPER = 36
WHY: dict[str, str] = {}
"""Why Limosa refuses a test that bare CRIU brings back."""


def prepare() -> None:
    """Of each worker: whatever loses its parent is ours to reap, and its network is its own."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    own_network()


@contextlib.contextmanager
def workroom() -> Iterator[Path]:
    """A folder of our own for images and for what Limosa keeps of its operations."""
    scratch = Path(tempfile.mkdtemp(prefix=".zdtm-", dir=source.folder()))
    os.environ["LIMOSA_RUNTIME_DIR"] = str(scratch / "runtime")
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def run(zdtm: Path, tests: Sequence[Test], jobs: int, limit: float, twice: Sequence[str]) -> list[Result]:
    """Runs them side by side, those that want to be alone afterwards; begins none once ``limit`` seconds are over."""
    begin, found = time.monotonic(), []
    with workroom() as scratch:
        for alone in (False, True):
            part = [t for t in tests if t.alone == alone]
            with ProcessPoolExecutor(1 if alone else jobs, initializer=prepare) as pool:
                waiting = {
                    pool.submit(_in_time, begin + limit, zdtm, t, scratch, 2 if t.label in twice else 1): t
                    for t in part
                }
                for number, done in enumerate(as_completed(waiting), 1):
                    result = done.result()
                    if result is None:
                        continue
                    found.append(result)
                    mark = "" if result.same else f"   <<< {result.limosa.how}: {result.limosa.why}"
                    print(
                        f"{number:3}/{len(part)} {result.label:36} {result.bare.how:8} {result.limosa.how:8}{mark}",
                        flush=True,
                    )
    return sorted(found, key=lambda r: r.label)


def _in_time(end: float, zdtm: Path, test: Test, scratch: Path, generations: int) -> Result | None:
    return both(zdtm, test, scratch, generations) if time.monotonic() < end else None


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="make test-zdtm", description=__doc__)
    parser.add_argument("names", nargs="*", help="these tests only (transition/NAME for those of transitions)")
    parser.add_argument("-j", "--jobs", type=int, default=2)
    parser.add_argument("--twice", type=int, default=92, help="so many go through two generations")
    parser.add_argument("--seed", type=int, default=1, help="which these are")
    parser.add_argument("--count", type=int, help="a sample of so many, by the seed")
    parser.add_argument("--limit", type=float, default=1e9, help="begin no test after so many seconds")
    parser.add_argument("--without", type=Path, nargs="*", default=[], help="what these earlier answers have")
    parser.add_argument("--json", type=Path, help="write the answers there")
    parser.add_argument("--page", type=Path, help="make a page of the answers, the earlier ones included")
    parser.add_argument("--list", action="store_true", help="say which apply, and why the others do not")
    options = parser.parse_args()

    def say(text: str) -> None:
        print(f"zdtm: {text}", file=sys.stderr, flush=True)

    zdtm = source.suite(say)
    source.install_headers(say)
    tests = [*suite.read(zdtm, "static"), *suite.read(zdtm, "transition")]
    if options.list:
        for test in tests:
            print(f"{test.label:36} {test.skip or 'applies'}")
        return 0
    before = [r for file in options.without for r in msgspec.json.decode(file.read_bytes(), type=list[Result])]
    known = {r.label for r in before}
    chosen = [t for t in tests if not t.skip and (not options.names or t.label in options.names)]
    if options.count is not None:
        chosen = random.Random(options.seed).sample(chosen, min(options.count, len(chosen)))
    picked = random.Random(options.seed).sample(chosen, min(options.twice, len(chosen)))
    unbuilt: dict[str, str] = {}
    for kind in ("static", "transition"):
        unbuilt |= source.build(zdtm, kind, [t.name for t in chosen if t.kind == kind], options.jobs)
    todo = [t for t in chosen if t.name not in unbuilt and t.label not in known]
    say(f"{len(tests)} tests, {len(chosen)} apply, {len(unbuilt)} cannot be built, {len(todo)} to run")
    for name, why in unbuilt.items():
        say(f"not built: {name}: {why}")
    results = run(zdtm, todo, options.jobs, options.limit, [t.label for t in picked])
    if options.json:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode([*before, *results])))
    if options.page:
        every = sorted([*before, *results], key=lambda r: r.label)
        options.page.write_text(report.page(tests, unbuilt, every, WHY))
    wrong = [r for r in results if not r.same]
    print(json.dumps({"run": len(results), "same": len(results) - len(wrong), "differ": [r.label for r in wrong]}))
    return int(any(r.limosa.how != "refused" for r in wrong))


if __name__ == "__main__":
    sys.exit(main())
