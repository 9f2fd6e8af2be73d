"""Jobs that several tests use one after the other, because each start of one costs a cuInit."""

from __future__ import annotations

from collections.abc import Callable

from conformance.jobs import Controller, Job

# What a test may ask for, and what the driver calls it.
STATES = {
    "initialised": "RUNNING",  # cuInit, no context
    "running": "RUNNING",
    "locked": "LOCKED",
    "checkpointed": "CHECKPOINTED",
    "restored": "LOCKED",  # restored and not unlocked yet
    "refused": "CHECKPOINTED",  # a restore with a wrong map was refused
}


class Pool:
    """Jobs in known states.

    Args:
        make: starts a job of a kind; what kinds there are is its business ("initialised" has no context).
    """

    def __init__(self, make: Callable[[str], Job]):
        self._make = make
        self._free: list[tuple[str, str, Job]] = []  # kind, state, job

    def take(self, state: str, controller: Controller, kind: str = "") -> Job:
        """A job in a state; give it back afterwards."""
        kind = "initialised" if state == "initialised" else kind
        alike = [kept for kept in self._free if kept[0] == kind]
        for kept in sorted(alike, key=lambda kept: kept[1] != state)[:1]:
            self._free.remove(kept)
            if kept[1] == state or bring(kept[2], state, controller):
                return kept[2]
            kept[2].kill()
        job = self._make(kind)
        bring(job, state, controller)
        return job

    def give_back(self, state: str, job: Job, controller: Controller, kind: str = "") -> None:
        """Keep a job for the next test if it is well: alive, nothing under way, its work at an end."""
        kind = "initialised" if state == "initialised" else kind
        well = job.alive() and job.idle()
        now = controller.state(job.pid, 5) if well else "?"
        if now == "RUNNING" and kind != "initialised":
            job.end_work()
            well = job.says("cuCtxSynchronize", limit=3) == "SUCCESS"
        if well and now == STATES[state]:
            self._free.append((kind, state, job))
        elif well and bring(job, "running", controller):
            self._free.append((kind, "running" if kind != "initialised" else kind, job))
        else:
            job.kill()

    def close(self) -> None:
        for _, _, job in self._free:
            job.kill()


def bring(job: Job, state: str, controller: Controller) -> bool:
    """Bring a job from whatever state it is in to another; False where that fails."""
    pid = job.pid
    ways: dict[str, list[Callable[[int], str]]] = {
        "initialised": [],
        "running": [],
        "locked": [controller.lock],
        "checkpointed": [controller.lock, controller.checkpoint],
        "restored": [controller.lock, controller.checkpoint, controller.restore],
        "refused": [controller.lock, controller.checkpoint],
    }
    now = controller.state(pid, 5)
    if now == "CHECKPOINTED":
        controller.restore(pid)
        now = "LOCKED"
    if now == "LOCKED":
        controller.unlock(pid)
    well = all(step(pid) == "SUCCESS" for step in ways[state])
    if state == "refused":
        well = controller.restore(pid, [(controller.uuids[0], controller.uuids[1])]) == "INVALID_VALUE"
    return well and controller.state(pid, 5) == STATES[state]
