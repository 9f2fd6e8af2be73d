"""One case of a container: what a run of the campaign does, and what is asked of a container besides."""

from __future__ import annotations

import contextlib
import shutil

from campaign.boxes import BoxJob
from campaign.processes import Found
from campaign.run import Run


class BoxedRun(Run):
    """One case of a container under way."""

    half_ended = False

    @property
    def box(self) -> BoxJob:
        """The container."""
        job = self.jobs[0]
        assert isinstance(job, BoxJob)
        return job

    def _let_go(self) -> None:
        boxes = self.room.boxes
        self.problems += boxes.acts_end()
        self.box.look()
        if "paused" in self.fault and self.box.alive() and self.box.frozen():  # whoever has paused it sees that it is
            self.box.befall("unpaused")
            self.problems += boxes.acts_end()

    def _now(self) -> list[tuple[str, list[int]]]:
        self.box.look()
        return super()._now()

    def _may_fail_to_undo(self) -> bool:
        return super()._may_fail_to_undo() or (self.kills_job and not self.first_lives())

    def _remove_kept(self) -> None:
        """A folder that was lent and that a disk does not let go is removed a day later (``lent.py``)."""
        super()._remove_kept()
        for folder in self.room.runtime.glob("*/lent/*") if self.case.step.startswith("disk.") else ():
            shutil.rmtree(folder)

    def first_lives(self) -> bool:
        """Whether the container that the run began with is there still."""
        return self.box.alive()

    def _excused(self, now: tuple[str, list[int]]) -> bool:
        if "restarted" in self.fault and now[0] == "running":  # it began anew, on the GPU that it was made with
            return True
        return super()._excused(now)

    def _judge(self, found: Found) -> None:
        super()._judge(found)
        self._judge_box(found)

    def _judge_box(self, found: Found) -> None:
        """Device nodes and device cgroup say where the job is; nothing else is frozen, mounted or there."""
        job, room, problems, rc = self.box, self.room, self.problems, found.rc
        if job.alive():
            state = room.state(job)
            if job.frozen():
                problems.append(f"the container is {state}, and its cgroup stays frozen")
                job.thaw()
            status = job.status()
            # Where podman is killed in the middle of "podman rm" it says so until it is told again.
            at_the_end = "the-end" in self.case.step and self.operation != "checkpoint"  # there it is ended after all
            self.half_ended = status == "stopping" and at_the_end
            if status != "running" and not self.half_ended:
                problems.append(f"the container is {state}, and its runtime says {status!r}")
            on = room.places(job)
            if state == "running" and on:
                nodes, may = job.nodes(), job.allowed(room.ground.gpus)
                if "limosa-nofile" in self.fault:  # what could not be taken away stays, and is told
                    nodes, may = ([gpu for gpu in found if gpu in on] for found in (nodes, may))
                if not nodes == may == on:
                    problems.append(f"the job is on GPU {on}, the container has the nodes of {nodes} and may use {may}")
        names = set(job.runtime.names())
        clone = room.boxes.clone
        strange = names - {job.name} - ({clone} if clone else set())
        if strange:
            problems.append(f"containers that nobody asked for: {sorted(strange)}")
        told = {warning["id"] for warning in found.answer.get("warnings", ())}
        # One that was started anew stays; where it was only after runc had forgotten the other one, nobody can tell.
        stays = "restarted" in self.fault and (self.case.victim.startswith("runc") or "container-anew" in told)
        if rc == 0 and self.case.operation == "checkpoint" and job.name in names and not stays:
            problems.append("the image is there, and the runtime still knows the container")
        gone = self.operation in ("restore", "restore-to") and not job.alive() and not self.kills_job
        if gone and job.name in names:
            problems.append(f"exit code {rc}, nothing runs, and the runtime still knows the container")
        left = room.boxes.shims_of_nobody() if job.known.box == "containerd" and "restarted" not in self.fault else []
        if left:
            problems.append(f"shims of containers that containerd does not know: {left}")
        if clone and self.operation == "clone":
            self._judge_clone(rc, clone, clone in names)
        if job.known.box == "podman" and len(left := room.boxes.mounts(room.boxes.podman)) > len(names):
            problems.append(f"mounts that are left: {left}")

    def _judge_clone(self, rc: int, name: str, there: bool) -> None:
        if rc == 0 and not there:
            self.problems.append("success, and there is no clone")
        if rc not in (0, -9, 1, 40) and there and self.told.get("recovered") is None:
            self.problems.append(f"exit code {rc}, and a clone is there")
        if there and self.fault.startswith("lost-"):  # it may have been on that GPU
            return
        if there:
            with contextlib.ExitStack() as stack:
                clone = BoxJob(self.room.boxes, self.case.victim, 0, name)
                stack.callback(clone.end)
                clone.prove()
                on, nodes = self.room.places(clone), clone.nodes()
                if on != nodes or clone.frozen():
                    self.problems.append(f"the clone is on {on} and has the nodes of {nodes}, frozen: {clone.frozen()}")

    def _bring_back(self) -> None:
        # Nobody hears any more what it says; nobody but podman rm takes it any more.
        if not self.problems and self.box.alive() and ("monitor" in self.fault or self.half_ended):
            for key in list(self.room.jobs):
                self.room.end(key)
            self.leaks(alone=True)
            return
        super()._bring_back()

    def leaks(self, *, alone: bool = False) -> None:
        if self.room.boxes.clone:
            self.room.boxes.end_clone()
        super().leaks(alone=alone)
