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
        make: starts a job that has initialised (True: and has a context and some memory).
    """

    def __init__(self, make: Callable[[bool], Job]):
        self._make = make
        self._free: list[tuple[str, Job]] = []

    def take(self, state: str, controller: Controller) -> Job:
        """A job in a state; give it back afterwards."""
        for kept in self._free:
            if kept[0] == state:
                self._free.remove(kept)
                return kept[1]
        with_context = state != "initialised"
        for kept in self._free:
            if (kept[0] != "initialised") == with_context:
                self._free.remove(kept)
                job = kept[1]
                break
        else:
            job = self._make(with_context)
        bring(job, state, controller)
        return job

    def give_back(self, state: str, job: Job, controller: Controller) -> None:
        """Keep a job for the next test if it is well: alive, nothing under way, and in the state that it was in."""
        if job.alive() and job.idle() and controller.state(job.pid, 5) == STATES[state]:
            self._free.append((state, job))
        elif job.alive() and job.idle() and state != "initialised" and bring(job, "running", controller):
            self._free.append(("running", job))
        else:
            job.kill()

    def close(self) -> None:
        for _, job in self._free:
            job.kill()


def bring(job: Job, state: str, controller: Controller) -> bool:
    """Bring a job from whatever state it is in to another; False where that fails."""
    pid = job.pid
    ways = {
        "initialised": [],
        "running": [],
        "locked": [controller.lock],
        "checkpointed": [controller.lock, controller.checkpoint],
        "restored": [controller.lock, controller.checkpoint, controller.restore],
        "refused": [controller.lock, controller.checkpoint],
    }
    now = controller.state(pid, 5)
    if now == "CHECKPOINTED":
        controller.restore(pid, controller.identity)
        now = "LOCKED"
    if now == "LOCKED":
        controller.unlock(pid)
    well = all(step(pid) == "SUCCESS" for step in ways[state])
    if state == "refused":
        well = controller.restore(pid, [(controller.uuids[0], controller.uuids[1])]) == "INVALID_VALUE"
    return well and controller.state(pid, 5) == STATES[state]
