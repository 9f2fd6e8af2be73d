"""What the proofs of the parked way share: jobs started by ``limosa run``, moved while they compute, and their twins.

Every proof writes a line of JSON (moves, pauses by the job's own clock, bytes parked, what was left to the driver) to
$LIMOSA_PROOFS; ``python tests/gpu/proofs.py FILE`` makes a table of it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from limosa.errors import LimosaError
from limosa.process.identity import read_stat

VICTIMS = Path(__file__).parent / "victims"
sys.path.append(str(Path(__file__).parents[1] / "shim"))  # known.py
HOLD = 400
"""Steps after which an undisturbed twin waits until it is known how many are wanted: it is not to take the GPU."""


class Job:
    """A victim under ``limosa run``: its trace, its own clock, its memory as the shim sees it."""

    def __init__(
        self,
        limosa: Callable[..., Any],
        folder: Path,
        argv: Sequence[str],
        env: dict[str, str],
        shim: bool,
        options: Sequence[str] = (),
    ):
        self.folder, self.argv, self.log = folder, list(argv), folder / "log"
        folder.mkdir(parents=True)
        words = [*options] if shim else [*options, "--no-shim"]
        name = f"proof-{folder.name}"
        command = ["run", *words, "--detach", "--log", self.log, "--name", name, "-o", "json", "--", *argv]
        said = limosa(*command, env=env, cwd=folder, rc=0, limit=30).json
        self.pid: int = said["pid"]

    # -- what it has done ----------------------------------------------------------------------------------------

    def trace(self, name: str = "trace") -> list[tuple[float, str]]:
        """(its clock, result) of every step; fails where one is missing or double."""
        path = self.folder / name
        text = path.read_text() if path.exists() else ""
        lines = [line.split(" ", 2) for line in text.rpartition("\n")[0].splitlines()]
        assert [int(line[0]) for line in lines] == list(range(len(lines))), f"{path} has steps missing or double"
        return [(float(line[1]), line[2]) for line in lines]

    def results(self, name: str = "trace") -> list[str]:
        """The results alone."""
        return [result for _, result in self.trace(name)]

    def steps(self) -> int:
        """How many steps it has made; cheap, because it is asked again and again."""
        try:
            with open(self.folder / "trace", "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - 400))
                lines = file.read().rpartition(b"\n")[0].splitlines()
        except FileNotFoundError:
            return 0
        return int(lines[-1].split()[0]) + 1 if lines else 0

    def pause(self, since: float) -> float:
        """Seconds of its longest time between two steps after ``since`` (our clock), less the usual time before.

        Its clock is ours until it comes from an image: CRIU then has it go on from the moment of the dump, in a time
        namespace of the job's own.
        """
        since += _clock_offset(self.pid) - _clock_offset("self")
        times = [at for at, _ in self.trace()]
        gaps = [(b - a, b) for a, b in itertools.pairwise(times)]
        usual = statistics.median([gap for gap, at in gaps if at < since] or [0.0])
        return max((gap for gap, at in gaps if at > since), default=0.0) - usual

    def text(self) -> str:
        """What it has said."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    # -- waiting ------------------------------------------------------------------------------------------------

    def alive(self) -> bool:
        """Whether it runs (zombies do not)."""
        try:
            return not read_stat(self.pid).ended
        except LimosaError:
            return False

    def until(self, true: Callable[[], bool], limit: float, what: str) -> None:
        """Waits; fails with its last words where it ends or takes too long."""
        end = time.monotonic() + limit
        while not true():
            ended = not self.alive()
            assert not ended or true(), f"{self.argv} has ended while waiting for {what}:\n{self.text()[-3000:]}"
            assert time.monotonic() < end, f"{self.argv}: no {what} within {limit} s:\n{self.text()[-3000:]}"
            time.sleep(0.01)

    def goes_on(self, steps: int = 5, limit: float = 60) -> None:
        """Waits until it has made some more steps."""
        goal = self.steps() + steps
        self.until(lambda: self.steps() >= goal, limit, f"step {goal}")

    def stop_at(self, step: int) -> None:
        """Tells it which step is the last."""
        (self.folder / "until.new").write_text(str(step))
        os.replace(self.folder / "until.new", self.folder / "until")

    def ends(self, limit: float = 90) -> None:
        """Waits until it has ended well."""
        end = time.monotonic() + limit
        while self.alive():
            assert time.monotonic() < end, f"{self.argv} does not end:\n{self.text()[-3000:]}"
            time.sleep(0.02)
        assert "DONE" in self.text().splitlines()[-5:], f"{self.argv} ended badly:\n{self.text()[-3000:]}"

    # -- its processes under the shim ---------------------------------------------------------------------------

    def family(self) -> list[int]:
        """It and its descendants, oldest first."""
        parents: dict[int, int] = {}
        for name in os.listdir("/proc"):
            if name.isdigit():
                with contextlib.suppress(OSError, IndexError):
                    parents[int(name)] = int(Path(f"/proc/{name}/stat").read_bytes().rpartition(b")")[2].split()[1])
        found = [self.pid]
        for pid in found:
            found += sorted(child for child, parent in parents.items() if parent == pid)
        return found

    def shims(self) -> dict[int, dict[str, Any]]:
        """What the shim says of each process that has a driver: GPUs that its memory is on, bytes, what was left."""
        from limosa.errors import LimosaError
        from limosa.parking.names import names_of
        from limosa.parking.shim import Shim
        from limosa.process.identity import Identity

        found: dict[int, dict[str, Any]] = {}
        # Without a driver there is nobody to ask: a DataLoader's worker, torchrun's agent.
        for pid in self.family():
            if not names_of(pid):
                continue
            try:
                with Shim(Identity.of(pid)) as shim:
                    memories, devices = shim.memories(), shim.devices()
                    found[pid] = {
                        "gpus": sorted({devices[m.device] for m in memories if not m.shared}),
                        "parked": sum(m.bytes for m in memories if not m.shared),
                        "away": sum(m.bytes for m in memories if m.away),
                        "shared": sum(m.bytes for m in memories if m.shared),
                        "left": {kind: both for kind, both in shim.counts().items() if both[0]},
                        "called": shim.called(),
                    }
            except LimosaError:
                assert not Path(f"/proc/{pid}").exists(), f"the shim of process {pid} does not answer"
        return found


def known_only(shims: dict[int, dict[str, Any]]) -> int:
    """Fails where a function about memory was called that the shim does not know; counts the functions called.

    Called, not asked for: the runtime asks for every function there is, those for OpenGL among them.
    """
    from known import not_known

    unknown = sorted({name for one in shims.values() for name in not_known(c for c in one["called"] if c.called)})
    assert not unknown, f"functions about memory that the shim does not know: {unknown}"
    return len({c.name for one in shims.values() for c in one["called"] if c.called})


class Prover:
    """One proof: a job that is moved, two twins that are not (one of them without the shim)."""

    def __init__(self, limosa: Callable[..., Any], folder: Path, gpus: Sequence[str], name: str):
        self.limosa, self.folder, self.gpus, self.name = limosa, folder, gpus, name
        self.ways: list[dict[str, Any]] = []
        self.record: dict[str, Any] = {"name": name, "moves": 0}
        self.jobs: list[Job] = []
        self.later: list[Callable[[], Job]] = []
        self.ended: Callable[[], None] = lambda: None  # called when the job has ended, before its twins begin

    def start(
        self,
        argv: Sequence[str],
        env: dict[str, str] | None = None,
        limit: float = 120,
        options: Sequence[str] = (),
        *,
        alone: bool = False,
    ) -> Job:
        """Starts all three (with options of ``limosa run``), waits until they compute; returns the one to move.

        ``alone``: the twins begin when it has ended.
        """
        env, hold = env or {}, 0 if alone else HOLD
        twin = [*argv, "--hold", str(hold)] if argv[-1] != "HOLD" else [*argv[:-1], str(hold)]
        own = argv if argv[-1] != "HOLD" else [*argv[:-1], "0"]
        kinds = (("moved", own, True), ("twin", twin, True), ("plain", twin, False))

        def begin(name: str, words: Sequence[str], shim: bool) -> Job:
            folder = self.folder / name
            full = [word.replace("FOLDER", str(folder)) for word in words]
            return Job(self.limosa, folder, full, env, shim, options)

        each, now = [partial(begin, *kind) for kind in kinds], 1 if alone else len(kinds)
        self.jobs += [one() for one in each[:now]]
        self.later = each[now:]
        for job in self.jobs:
            job.until(lambda job=job: job.steps() > 10, limit, "steps")
        return self.jobs[0]

    def beside(self, argv: Sequence[str], env: dict[str, str] | None = None) -> Job:
        """Starts one that is no twin of anybody's, and waits until it computes."""
        folder = self.folder / "other"
        words = [word.replace("FOLDER", str(folder)) for word in argv]
        other = Job(self.limosa, folder, words, env or {}, shim=True)
        other.until(lambda: other.steps() > 10, 120, "steps")
        return other

    def acts(self, job: Job, act: Callable[[], Any], where: Sequence[str] | None, least: int) -> Any:
        """Does one thing to the job, looks where its memory is then, waits until it has gone on."""
        since = time.monotonic()
        result = act()
        wall = time.monotonic() - since
        timings = dict(getattr(result, "timings", {}))
        job.goes_on()
        shims = job.shims()
        parked = sum(one["parked"] for one in shims.values())
        assert parked >= least, f"{parked} bytes are looked after, not {least}: {shims}"
        if where is not None:
            assert {gpu for one in shims.values() for gpu in one["gpus"]} == set(where), shims
        self.ways.append(
            {
                "pause": job.pause(since),
                "said": timings.get("pause_seconds"),
                "wall": wall,
                "bytes": getattr(result, "bytes", 0),
                "way": getattr(result, "way", ""),
            }
        )
        return result

    def moves(self, job: Job, times: int, least: int, gpu_map: str | None = None) -> None:
        """Moves it there and back, again and again, while it computes; on one GPU it is suspended and resumed."""
        from limosa import operation

        if len(self.gpus) < 2:
            self.rests(job, times, least)
            return
        here = 0
        for turn in range(times):
            there = 1 - here
            to: dict[str, Any] = {"gpu_map": gpu_map} if gpu_map else {"to": str(there)}
            where = self.gpus if gpu_map else [self.gpus[there]]
            outcome = self.acts(job, lambda to=to: operation.move(job.pid, timeout=60, **to)[0].result, where, least)
            assert outcome.way == "parked", f"move {turn + 1}: {outcome}"
            assert outcome.bytes >= least
            here = there
            self.record["moves"] += 1
            time.sleep(0.1)

    def rests(self, job: Job, times: int, least: int) -> None:
        """Suspends and resumes it, again and again."""
        from limosa import operation

        for turn in range(times):
            operation.suspend(job.pid, timeout=60)
            outcome = self.acts(job, lambda: operation.resume(job.pid, timeout=60)[0].result, self.gpus, least)
            assert outcome.way == "parked", f"resume {turn + 1}: {outcome}"
            self.record["moves"] += 1

    def twins_agree(self, job: Job, traces: Sequence[str] = ("trace",)) -> None:
        """Ends all three after the same number of steps and compares every step of theirs, bit for bit."""
        shims = job.shims()
        self.record["functions"] = known_only(shims)
        self.record["left"] = _added(one["left"] for one in shims.values())
        self.record["parked"] = sum(one["parked"] for one in shims.values())
        self.record["processes"] = len(shims)
        times = [at for at, _ in job.trace()]
        a_second = len([at for at in times if at > times[-1] - 1])
        job.stop_at(job.steps() + max(50, 2 * a_second))
        job.ends()
        self.ended()
        moved = {name: job.results(name) for name in traces}
        steps = len(moved[traces[0]])
        self.jobs += [begin() for begin in self.later]
        for twin in self.jobs[1:]:
            twin.stop_at(steps)
        for twin in self.jobs[1:]:
            twin.ends(240)  # as many steps as the job made while it was moved, with seven others beside them
        self.record["steps"] = steps
        for name in traces:
            one, other = (twin.results(name) for twin in self.jobs[1:])
            assert min(len(one), len(other)) >= steps
            assert first_difference(one, other) is None, f"undisturbed twins differ: {first_difference(one, other)}"
            different = first_difference(moved[name], one[: len(moved[name])])
            assert different is None, f"the moved job differs from its twins: {different}"
        self.save()

    def save(self) -> None:
        """Writes down what was seen."""
        for what in ("pause", "said", "wall"):
            values = [w[what] for w in self.ways if w[what] is not None]
            if values:
                self.record[what] = {"median": statistics.median(values), "most": max(values)}
        self.record["ways"] = self.ways
        note(self.record)


def _clock_offset(pid: int | str) -> float:
    """By how many seconds a process's CLOCK_MONOTONIC is ahead of the machine's."""
    for line in Path(f"/proc/{pid}/timens_offsets").read_text().splitlines():
        name, seconds, nanoseconds = line.split()
        if name == "monotonic":
            return int(seconds) + int(nanoseconds) / 1e9
    return 0.0


def first_difference(one: Sequence[str], other: Sequence[str]) -> tuple[int, str, str] | None:
    """The first step at which two traces differ: its number, and what each says."""
    for step, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return step, a, b
    return None


def note(record: dict[str, Any]) -> None:
    """Appends a line to $LIMOSA_PROOFS, where that is set."""
    path = os.environ.get("LIMOSA_PROOFS")
    if path:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def _added(counts: Any) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    for one in counts:
        for kind, (calls, size) in one.items():
            before = found.get(kind, (0, 0))
            found[kind] = before[0] + calls, before[1] + size
    return found


def page(records: Sequence[dict[str, Any]]) -> str:
    """A table of proofs."""
    lines = [
        "| job | moved | steps, all equal to both twins' | pause by its own clock, median / most, s | parked, GB "
        "| left to the driver |",
        "|---|---|---|---|---|---|",
    ]
    for r in records:
        if "steps" not in r:
            continue
        pause = r.get("pause", {"median": 0.0, "most": 0.0})
        left = ", ".join(f"{k} {n}× {size / 1e6:.0f} MB" for k, (n, size) in sorted(r["left"].items())) or "nothing"
        back = f", brought back {r['restores']} ×" if r.get("restores") else ""
        lines.append(
            f"| {r['name']} | {r['moves']} ×{back} | {r['steps']} | {pause['median']:.2f} / {pause['most']:.2f} "
            f"| {r['parked'] / 1e9:.2f} | {left} |"
        )
    for r in (r for r in records if "asked" in r):
        lines += ["", f"{r['name']}: {r['asked']} requests, {r['answered']} answers, {r['wrong']} of them wrong."]
    for r in (r for r in records if "grown" in r):
        more = ", ".join(f"{name} {value:,}" for name, value in r["grown"].items() if value) or "nothing"
        lines += [
            "",
            f"One job moved {r['moves']} times in {r['seconds']:.0f} s (pause {r['said']['median']:.2f} s, at most "
            f"{r['said']['most']:.2f}); of {len(r['grown'])} figures (GPUs, job, vault, mover, limosa: memory, address "
            f"space, descriptors, mappings, threads) there was more at the end than after the first tenth of: {more}.",
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as lines:
        print(page([json.loads(line) for line in lines]))
