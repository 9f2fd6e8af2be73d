"""Random sequences of verbs over several jobs and GPUs, checked against a model after each: a Hypothesis state machine.

Run in a node (``test_sequences.py`` starts one). The model knows of each job whether it runs, is suspended or is an
image, and on which GPUs; some verbs are disturbed, and then the job has to be as before or as promised.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Verbosity, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from campaign.room import Room

KINDS = ("one", "tree", "threads", "vmm", "two-gpus")
FAULTS = (
    "",
    "",
    "",
    "function=cuCheckpointProcessLock result=999",
    "function=cuCheckpointProcessCheckpoint result=2",
    "function=cuCheckpointProcessCheckpoint after=999",
    "function=cuCheckpointProcessRestore result=304",
    "function=cuCheckpointProcessRestore after=999",
    "function=cuCheckpointProcessUnlock result=999",
    "function=cuCheckpointProcessRestore crash=caller",
    "function=cuCheckpointProcessCheckpoint crash-after=caller",
    "function=nvmlDeviceGetCount_v2 nth=2 result=999",
    "kill 0.05",
    "kill 0.12",
    "kill 0.2",
)

room: Room


class Sequences(RuleBasedStateMachine):
    """Two or three jobs on four GPUs."""

    def __init__(self) -> None:
        super().__init__()
        self.state: dict[str, str] = {}
        self.places: dict[str, list[int]] = {}
        self.images: dict[str, Path] = {}
        self.numbers = 0
        self.last: object = None

    # -- what is begun with -------------------------------------------------------------------------

    @initialize(first=st.sampled_from(KINDS), second=st.sampled_from(KINDS))
    def start(self, first: str, second: str) -> None:
        for key, kind, gpu in (("a", first, 0), ("c", second, 2)):
            room.job(key, kind, gpu)
            self.state[key] = "running"
            self.places[key] = room.places(room.jobs[key])

    def some(self, key: str, *states: str) -> bool:
        return self.state.get(key) in states

    # -- verbs --------------------------------------------------------------------------------------

    def do(
        self, key: str, argv: list[str], fault: str, promised: tuple[str, list[int]], image: Path | None = None
    ) -> None:
        """Runs a verb and looks whether the job is where its exit code says."""
        before = (self.state[key], self.places[key])
        if fault.startswith("kill"):
            room.after(float(fault.split()[1]), lambda: _kill(room.controller_pid))
        elif fault:
            room.ground.arm([fault])
        found = room.operate([*argv, "-o", "json"], points=False)
        room.ground.disarm()
        assert room.settle() == []
        wanted = [before] if found.rc else [promised]
        if found.rc in (-9, 1, 40):
            again = room.operate(["recover", "-o", "json"], points=False)
            assert again.rc in (0, 41), again
            assert room.settle() == []
            wanted = [before, promised]
        elif found.rc == 41:
            wanted = [("suspended", self.places[key])]
        self.last = (fault, found.short())
        now = self.seen(key)
        if now[0] == "ended" and image is not None and image.exists():
            self.images[key] = image
        elif image is not None:
            shutil.rmtree(image, ignore_errors=True)
        short = [(state, places if state == "running" else []) for state, places in wanted]
        assert (now[0], now[1] if now[0] == "running" else []) in short, (found.short(), now, wanted)
        self.state[key] = now[0]
        if now[0] == "running":
            self.places[key] = now[1]

    def seen(self, key: str) -> tuple[str, list[int]]:
        job = room.jobs[key]
        state = {"checkpointed": "suspended", "gone": "ended"}.get(room.state(job), room.state(job))
        return state, room.places(job)

    def away(self, key: str) -> list[int]:
        return sorted((p + 2) % 4 for p in self.places[key])

    jobs = st.sampled_from(("a", "c"))
    faults = st.sampled_from(FAULTS)

    @rule(key=jobs, fault=faults)
    def move(self, key: str, fault: str) -> None:
        if self.some(key, "running"):
            job = room.jobs[key]
            self.do(key, ["move", str(job.pid), room.there(self.places[key])], fault, ("running", self.away(key)))

    @rule(key=jobs, fault=faults)
    def suspend(self, key: str, fault: str) -> None:
        if self.some(key, "running", "suspended"):
            self.do(key, ["suspend", str(room.jobs[key].pid)], fault, ("suspended", []))

    @rule(key=jobs, fault=faults)
    def resume(self, key: str, fault: str) -> None:
        if self.some(key, "running", "suspended"):
            self.do(key, ["resume", str(room.jobs[key].pid)], fault, ("running", self.places[key]))

    @rule(key=jobs, fault=faults)
    def resume_elsewhere(self, key: str, fault: str) -> None:
        if self.some(key, "suspended"):
            argv = ["resume", str(room.jobs[key].pid), room.there(self.places[key])]
            self.do(key, argv, fault, ("running", self.away(key)))

    @rule(key=jobs, fault=faults)
    def toggle(self, key: str, fault: str) -> None:
        if self.some(key, "running", "suspended"):
            promised = ("suspended", []) if self.some(key, "running") else ("running", self.places[key])
            self.do(key, ["toggle", str(room.jobs[key].pid)], fault, promised)

    @rule(key=jobs, fault=faults)
    def copy(self, key: str, fault: str) -> None:
        if self.some(key, "running"):
            path = self.folder()
            argv = ["checkpoint", str(room.jobs[key].pid), "--output", str(path), "--leave-running"]
            self.do(key, argv, fault, ("running", self.places[key]))
            shutil.rmtree(path, ignore_errors=True)

    @rule(key=jobs, fault=faults)
    def checkpoint(self, key: str, fault: str) -> None:
        if self.some(key, "running"):
            path = self.folder()
            argv = ["checkpoint", str(room.jobs[key].pid), "--output", str(path)]
            self.do(key, argv, fault, ("ended", []), path)

    @precondition(lambda self: "ended" in self.state.values())
    @rule(key=jobs, fault=faults, elsewhere=st.booleans())
    def restore(self, key: str, fault: str, elsewhere: bool) -> None:
        if self.some(key, "ended"):
            argv = ["restore", str(self.images[key])]
            places = self.away(key) if elsewhere else self.places[key]
            self.do(key, argv + ([room.there(self.places[key])] if elsewhere else []), fault, ("running", places))

    @rule()
    def swap(self) -> None:
        a, c = (self.places[key] for key in ("a", "c"))
        if all(self.some(key, "running") for key in ("a", "c")) and len(a) == len(c) == 1 and a != c:
            found = room.operate(
                ["move", str(room.jobs["a"].pid), str(room.jobs["c"].pid), "--swap", "-o", "json"], points=False
            )
            assert found.rc == 0, found
            self.places["a"], self.places["c"] = c, a
            assert [self.seen(key) for key in ("a", "c")] == [("running", c), ("running", a)]

    def folder(self) -> Path:
        self.numbers += 1
        path = room.base / "images" / f"image-{self.numbers}"
        shutil.rmtree(path, ignore_errors=True)
        return path

    # -- what always holds --------------------------------------------------------------------------

    @invariant()
    def every_job_is_there_once_and_its_memory_is_its_twins(self) -> None:
        for key, state in self.state.items():
            job = room.jobs[key]
            if state == "running":
                job.goes_on()
                job.prove()
                assert len(job.session()) == job.slots
            assert self.seen(key)[0] == state
        left = room.litter()
        assert left == [], (left, room.words_of(left), self.last)
        suspended = sum(state == "suspended" for state in self.state.values())
        assert len(room.suspended_records()) == suspended
        assert room.strangers() == {}

    def teardown(self) -> None:
        room.reset()


def _kill(pid: int) -> None:
    import os
    import signal

    if pid:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def main() -> int:
    """Runs that many sequences."""
    global room
    examples, steps, seed = (int(word) for word in sys.argv[1:4])
    room = Room()
    try:
        from hypothesis import seed as seeded

        machine: Any = seeded(seed)(Sequences)
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=examples,
                stateful_step_count=steps,
                deadline=None,
                database=None,
                print_blob=True,
                verbosity=Verbosity.normal,
                suppress_health_check=list(HealthCheck),
            ),
        )
    finally:
        room.close()
    print(f"{examples} sequences of up to {steps} verbs: all right")
    return 0


if __name__ == "__main__":
    sys.exit(main())
