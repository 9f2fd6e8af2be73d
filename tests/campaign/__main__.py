"""The campaign: hands cases to rooms, goes on after failures, writes the summary.

python -m campaign                        every (operation, step, fault), classes of victim in turn
python -m campaign --case NAME --seed 3   one case again
python -m campaign --count 400 --seed 1   a sample
python -m campaign --record               write steps.json anew
python -m campaign --way parked …         the same of jobs under the shim (parked.json)
python -m campaign --way ranks …          the same of jobs of several ranks (ranks.json)
python -m campaign --way containers …     the same of containers (containers.json)
python -m campaign --merge A B --summary C several parts as one

A long campaign in parts, each of which may be cut off at any time:
python -m campaign --limit 500 --summary 1.json
python -m campaign --limit 500 --summary 2.json --without 1.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from containers.engines import engines
from surroundings import as_usual

from campaign import cases, containers, parked, ranks
from campaign.cases import Case
from campaign.ground import ROOM, clear_cgroups
from campaign.processes import REAL, python_path
from campaign.summary import Summary, merged, names_in

ROOM_LIMIT = 300.0 if REAL else 90.0
"""Seconds without an answer after which a room is given up."""
GPUS = 4
REPLAY_MORE = 60.0
"""Seconds after the limit in which runs that have failed are replayed."""


class RoomProcess:
    """A room in a process of its own: a pid namespace and a node, or just this machine."""

    def __init__(self, ground: str):
        env = {**os.environ, "PYTHONPATH": python_path(), "LIMOSA_CAMPAIGN": ground, "PYTHONDONTWRITEBYTECODE": "1"}
        self.token = secrets.token_hex(4)
        env[ROOM] = self.token
        env.pop("LIMOSA_RUNTIME_DIR", None)  # its own is made there; what has a test's ends with that
        command = [sys.executable, "-m", "campaign.room"]
        if ground == "soft":
            node = [sys.executable, "-m", "limosa", "softgpu", "--gpus", str(GPUS), "--memory", "1GiB", "--"]
            command = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", *node, *command]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, cwd="/", start_new_session=True
        )
        self.busy: tuple[Case, int] | None = None
        self.since = time.monotonic()
        self._buffer = b""
        self.ready = self.met = False  # met: it has said so itself

    def give(self, case: Case, seed: int, record: bool = False) -> None:
        """Gives it a case."""
        assert self.process.stdin is not None
        self.busy, self.since = (case, seed), time.monotonic()
        self.process.stdin.write(json.dumps({"case": case, "seed": seed, "record": record}).encode() + b"\n")
        self.process.stdin.flush()

    def fileno(self) -> int:
        """Where its results come from."""
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def lines(self) -> list[dict[str, Any]] | None:
        """What it has said; None where it has ended."""
        chunk = os.read(self.fileno(), 1 << 20)
        if not chunk:
            return None
        *whole, self._buffer = (self._buffer + chunk).split(b"\n")
        return [json.loads(line) for line in whole if line]

    def let_end(self) -> None:
        """It gets no more cases."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()

    def end(self, until: float) -> None:
        """Waits for its end until then, or ends it."""
        try:
            self.process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.kill()
        clear_cgroups(self.token)

    def kill(self) -> None:
        """Ends it and its session."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except OSError:
            pass
        self.process.wait()
        clear_cgroups(self.token)


def run(
    todo: Iterable[tuple[Case, int]],
    *,
    rooms: int = 2,
    ground: str = "soft",
    record: bool = False,
    limit: float | None = None,
    tell: Any = lambda _: None,
    kept: list[RoomProcess] | None = None,
) -> list[dict[str, Any]]:
    """Runs cases in rooms.

    Args:
        todo: cases with their seeds, in their order.
        rooms: how many at a time.
        ground: "soft", "real" or "host".
        record: have steps noted.
        limit: seconds after which no more is begun.
        tell: called with each result.
        kept: rooms of earlier runs, which are used first, and where those that are left go; whoever gives them ends
            them.

    Returns:
        A result for each case that was run.
    """
    waiting = list(todo)[::-1]
    results: list[dict[str, Any]] = []
    if not waiting:
        return results
    begun = time.monotonic()
    living = [kept.pop() if kept else RoomProcess(ground) for _ in range(max(1, min(rooms, len(waiting))))]

    def done(result: dict[str, Any]) -> None:
        results.append(result)
        tell(result)

    def next_for(room: RoomProcess) -> None:
        room.busy = None
        if limit is not None and time.monotonic() - begun > limit:
            waiting.clear()
        if waiting:
            room.give(*waiting.pop(), record)

    for room in living:
        if room.met:
            next_for(room)
    try:
        while any(room.busy for room in living) or waiting or not all(room.ready for room in living):
            ready = select.select(living, [], [], 1.0)[0]
            for number, room in enumerate(living):
                lines: list[dict[str, Any]] | None = []
                if room in ready:
                    lines = room.lines()
                for line in lines or []:
                    if not line.get("ready"):
                        done(line)
                    room.ready = room.met = True
                    if line.get("problems") and ground == "soft":  # what it has left is not to be the next one's
                        room.busy = None
                        room.let_end()
                        room.end(time.monotonic() + 20)
                        living[number] = RoomProcess(ground)
                        living[number].ready = not waiting
                        break
                    next_for(room)
                late = (room.busy or not room.ready) and time.monotonic() - room.since > ROOM_LIMIT
                if lines is None or late:
                    what = "died" if lines is None else f"gave no answer for {ROOM_LIMIT:g} s"
                    if room.busy:
                        case, seed = room.busy
                        done(
                            {
                                "name": case.name,
                                "seed": seed,
                                "problems": [f"the room {what}"],
                                "rc": None,
                                "seconds": 0,
                            }
                        )
                    elif not room.ready:
                        raise RuntimeError(f"a room {what} before it was ready")
                    room.kill()
                    living[number] = RoomProcess(ground)
                    if not waiting:
                        living[number].ready = True
    finally:
        if kept is not None:
            kept += [room for room in living if room.met and not room.busy and room.process.poll() is None]
            living = [room for room in living if room not in kept]
        for room in living:
            room.let_end()
        patience = 20.0 if not waiting and not any(room.busy for room in living) else 1.0  # somebody has had enough
        until = time.monotonic() + patience
        for room in living:
            room.end(until)
    return results


def record(rooms: int, ground: str, only: Sequence[str] = (), way: str = "driver") -> dict[str, Any]:
    """Runs every operation undisturbed with every class of victim and notes its steps."""
    if way == "ranks":
        names = [(o, v) for v in ranks.VICTIMS for o in ranks.OPERATIONS if ranks.possible(o, v)]
    elif way == "containers":
        every = (*containers.OPERATIONS, *containers.HOLDING)
        names = [(o, v) for v in containers.VICTIMS for o in every if containers.possible(o, v)]
    elif way == "parked":
        names = [(o, v) for v in parked.VICTIMS for o in parked.OPERATIONS if parked.possible(o, v)]
    else:
        names = [(o, v) for v in cases.VICTIMS for o in cases.OPERATIONS if cases.possible(o, v, ground)]
    todo = [(Case(o, v, "run", "none"), 0) for o, v in names if not only or f"{o}/{v}" in only]
    found: dict[str, Any] = {}
    for result in run(todo, rooms=rooms, record=True, ground=ground):
        if result["problems"]:
            print(f"{result['name']}: {result['problems']} {result.get('stderr', '')}"[:900], file=sys.stderr)
            continue
        operation, victim, *_ = result["name"].split("/")
        found[f"{operation}/{victim}"] = result["steps"]
    return found


def spread(picked: list[Case], seed: int, block: int = 800) -> list[tuple[Case, int]]:
    """In an order in which victims can be used again: in each block, those of one class one after another."""
    ordered: list[Case] = []
    for start in range(0, len(picked), block):
        part = picked[start : start + block]
        ordered += sorted(part, key=lambda c: (c.victim, c.operation in cases.WITH_CRIU, c.operation))
    return [(case, seed) for case in ordered]


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="campaign", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--case")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", default="", help="how many runs, or all (else: every operation, step, fault once)")
    parser.add_argument("--rooms", type=int, default=min(12, os.cpu_count() or 2), help="how many nodes side by side")
    parser.add_argument("--ground", default=os.environ.get("LIMOSA_CAMPAIGN", "soft"))
    parser.add_argument(
        "--way", choices=("driver", "parked", "ranks", "containers"), default="driver", help="whose victims"
    )
    parser.add_argument("--only", default="", help="parts of names that cases must have, separated by commas")
    parser.add_argument("--without", type=Path, nargs="*", default=[], help="summaries of what was run already")
    parser.add_argument("--part", default="", help="K/N: every N-th of the chosen cases, beginning with the K-th")
    parser.add_argument("--limit", type=float, default=None, help="seconds after which no more is begun")
    parser.add_argument("--summary", type=Path, default=None, help="where JSON goes, a table beside it; every 30 s")
    parser.add_argument("--merge", type=Path, nargs="+", default=[], help="summaries to make one of; nothing is run")
    parser.add_argument("--no-replay", action="store_true", help="do not run once more, alone, what has failed")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--list", action="store_true")
    chosen = parser.parse_args()
    as_usual()
    if chosen.way == "containers" or (chosen.case and Case.named(chosen.case).boxed):
        engines()  # fetched once, before rooms need them
    if chosen.ground == "real":
        os.environ["LIMOSA_CAMPAIGN"] = "real"
        chosen.count = chosen.count or "330"
    if chosen.record:
        path = {"parked": parked.STEPS, "ranks": ranks.STEPS, "containers": containers.STEPS}.get(
            chosen.way, cases.STEPS
        )
        only = [part for part in chosen.only.split(",") if part]
        found = {**cases.table(path), **record(chosen.rooms, chosen.ground, only, chosen.way)}
        path.write_text(cases.as_text(found))
        print(f"{len(found)} operations recorded")
        return 0
    if chosen.case:
        results = run([(Case.named(chosen.case), chosen.seed)], rooms=1, ground=chosen.ground)
        print(json.dumps(results, indent=1))
        return int(any(r["problems"] for r in results))
    everything = cases.everything(chosen.ground, chosen.way)
    if chosen.merge:
        whole = merged(chosen.merge, everything, chosen.summary)
        whole.end()
        return int(bool(whole.failures))
    known = everything
    parts = [part for part in chosen.only.split(",") if part]
    everything = [case for case in everything if all(part in case.name for part in parts)]
    count = len(everything) if chosen.count == "all" else int(chosen.count or cases.once(everything))
    picked = cases.chosen(everything, count, chosen.seed)
    if chosen.part:
        k, n = (int(word) for word in chosen.part.split("/"))
        picked = picked[k - 1 :: n]
    done = {name for path in chosen.without for name in names_in(path)}
    picked = [case for case in picked if case.name not in done]
    if chosen.list:
        print("\n".join(case.name for case in picked))
        return 0
    return campaign(chosen, picked, known)


def campaign(chosen: argparse.Namespace, picked: list[Case], known: list[Case]) -> int:
    """Runs these cases, then those again that have failed, alone; writes the summary."""
    summary = Summary(len(picked), known, chosen.seed, chosen.summary)
    print(f"{len(picked)} runs of {len(known)} cases, seed {chosen.seed}, {chosen.rooms} rooms", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the rooms are ended, and what was found is kept
    begun = time.monotonic()
    try:
        todo = spread(picked, chosen.seed)
        run(todo, rooms=chosen.rooms, ground=chosen.ground, limit=chosen.limit, tell=summary.add)
        summary.write()
        if not chosen.no_replay:
            left = None if chosen.limit is None else max(0.0, chosen.limit + REPLAY_MORE - (time.monotonic() - begun))
            run(summary.to_replay(), rooms=1, ground=chosen.ground, limit=left, tell=summary.add_replay)
    finally:  # what was found is worth keeping, also where somebody has had enough of it
        summary.end()
    return int(bool(summary.failures))


if __name__ == "__main__":
    sys.exit(main())
