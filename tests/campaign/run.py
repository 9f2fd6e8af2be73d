"""One case: prepared, disturbed, judged, brought back to a running job whose memory is its twin's."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from campaign import ground, losses, parked, ranks
from campaign.cases import ACTS, Case
from campaign.faults import BROKEN, Fault
from campaign.helpers import held, helper_pids
from campaign.jobs import Job, Lost
from campaign.losses import AWAKENING
from campaign.processes import Found, send_signal

if TYPE_CHECKING:
    from campaign.room import Room


ASIDE = ("checkpointed", "away")
"""States of a job that is suspended."""
LATER = 15.0
"""Seconds within which what ends, or lets go, has done so: on a busy machine, too."""


class Run(Fault):
    """One case under way.

    Attributes:
        found: how the command line ended.
        told: what is worth keeping of the run.
        problems: what was wrong.
    """

    def __init__(self, room: Room, case: Case, record: bool):
        super().__init__(room, case)
        self.record = record
        self.found: Found | None = None
        self.told: dict[str, Any] = {}
        self.problems: list[str] = []
        self.recovered: list[str] = []

    def go(self) -> list[str]:
        """Prepares, disturbs, judges, brings back; what was wrong."""
        room, case = self.room, self.case
        early = self.hazard is not None and self.hazard.early
        if early:  # before there is a job, so that none is there already that could come back
            room.reset()
            room.job("a", case.victim)
            self.arm_hazard()
        self.places = room.home = room.prepare(case)
        self.image = room.images.get(f"a-{case.victim}") if self.operation in ("restore", "restore-to") else None
        self.jobs = [room.jobs["a"], *([room.jobs["b"]] if "b" in room.jobs else [])]
        for job in self.jobs:
            if job.alive() and room.state(job) == "running":
                job.goes_on()
        self.before = [(room.state(j), room.places(j)) for j in self.jobs]
        self.ranks_before = self._of_ranks()
        argv = room.command(self.operation if case.operation in BROKEN else case.operation, self.jobs[0], self.places)
        if case.operation in BROKEN:
            point = {"name": BROKEN[case.operation][1], "n": 0, "do": "kill", "who": ["worker", "limosa"]}
            broken = room.operate(argv, at=[point], parked=case.parked, boxed=case.boxed)
            room.settle()
            if broken.rc != -9:
                raise Lost(f"was not killed: {broken.short()} {broken.said[-3:]}")
            argv = ["recover", "-o", "json"]
        self.base = self._snapshot()
        order = self.order()
        busy = self._busy() if self.fault == "busy-target" else None
        if self.fault == "refused-map":
            argv = [a for a in argv if not a.startswith(("--to", "--map"))] + ["--map=0=99"]
        try:
            self.found = room.operate([*argv, *self.extra], **order)
        finally:
            if busy is not None:
                busy()
            for undo in self.undo:
                undo()
        room.files_again()
        if "limosa-nofile" in self.fault and "mover" in helper_pids():  # one that it has started may open no more
            send_signal(helper_pids()["mover"], signal.SIGKILL)
        if self.record and case.parked:
            assert isinstance(room.ground, ground.Soft)
            counts = {name: room.ground.switches.count(rule) for name, rule in self.measure.items()}
        self._fired()
        if not early:
            room.ground.disarm()
        if self.fault == "stop-for-good":
            self._continued()
        self._let_go()
        self.problems += room.settle()
        room.stopped = 0.0
        self._continued()
        if self.record:
            self.told["steps"] = _steps(self.found)
            if case.parked:
                self.told["steps"][parked.MEASURED] = {name: count for name, count in counts.items() if count}
        if self.loses_job and self.told["happened"]:
            losses.judge(self, self.found)
            return self.problems
        self._judge(self.found)
        self._bring_back()
        return self.problems

    def _let_go(self) -> None:
        """What somebody did to the job meanwhile comes to its end."""

    def _continued(self) -> None:
        for job in self.jobs:
            for pid in {job.pid, job.stoppable}:
                send_signal(pid, signal.SIGCONT)

    def _busy(self) -> Callable[[], None]:
        """Another operation has its hands on the job: a claim that lives."""
        from limosa.operation.claims import Claim
        from limosa.process.identity import Identity
        from limosa.process.tree import job_tree

        root = Identity.of(self.jobs[0].pid)
        claim = Claim(id="other", operation="move", holder=Identity.of(os.getpid()), pids=job_tree(root))
        claim.save()
        return claim.release

    def _fired(self) -> None:
        """A fault that has not happened is no test, unless the operation had come to its end before."""
        assert self.found is not None
        kind = self.case.step.split(".")[0]
        happened = bool(self.found.at)
        if kind in ("call", "nvml", "inside", "hazard", "mover", "job", "nccl"):
            assert isinstance(self.room.ground, ground.Soft)
            happened = self.room.ground.has_fired()
        self.told["happened"] = happened or kind == "run"
        if self.loses_job and not happened:
            raise Lost(f"the driver was not made to lose the job: {self.found.short()}")

    def _snapshot(self) -> dict[str, Any]:
        found = self.room.ground.leftovers()
        for _ in range(15 if self.case.parked and parked.churns(self.case.victim) else 0):  # what does not come and go
            time.sleep(0.002)
            now = self.room.ground.leftovers()
            found |= {key: min(found[key], now[key]) for key in ("used", "blocks of device memory")}
        return found

    def _promised(self) -> tuple[str, list[int]]:
        """State and GPUs of the first job where all went well."""
        half, gpus = max(1, self.room.ground.gpus // 2), max(1, self.room.ground.gpus)
        away = sorted((p + half) % gpus for p in self.places)
        return {
            "move": ("running", away),
            "swap": ("running", away),
            "exchange": ("running", self.places),
            "suspend": ("checkpointed", []),
            "resume": ("running", self.places),
            "suspend-memory": ("away", self.places),
            "resume-memory": ("running", self.places),
            "resume-to": ("running", away),
            "toggle-down": ("checkpointed", []),
            "toggle-up": ("running", self.places),
            "checkpoint": ("gone", []),
            "leave-running": ("running", self.places),
            "clone": ("running", self.places),
            "restore": ("running", self.places),
            "restore-to": ("running", away),
        }[self.operation]

    def _now(self) -> list[tuple[str, list[int]]]:
        return [(self.room.state(j), self.room.places(j)) for j in self.jobs]

    def whole_image(self) -> bool:
        """Whether there is a new image, every byte of it right."""
        from limosa.errors import LimosaError
        from limosa.image import open_image, verify

        path = self.room.base / "images" / "image-new"
        if not path.exists():
            return False
        try:
            with open_image(path) as image:
                if not verify(image).ok:
                    self.problems.append("an image is there and is damaged")
                return True
        except LimosaError as error:
            self.problems.append(f"an image is there and cannot be opened: {error}")
            return False

    def _judge(self, found: Found) -> None:
        """Exit code and state agree; what is needed of ``recover`` is done."""
        room, problems, rc = self.room, self.problems, found.rc
        self.recovered = [one["did"] for one in found.answer.get("recovered", [])]  # where it was a recover itself
        late = [one for one in found.said if "late" in one]
        if late:
            problems.append(f"did not end in time: {late}")
        crash = [one["crash"] for one in found.said if "crash" in one]
        if crash or rc in (98, 99):
            problems.append(f"crashed: {crash} {found.stderr[-300:]}")
        early = rc in (-15, -1, 130) and "random-sig" in self.fault  # before it had begun
        unfinished = early or rc in (-9, 1, 40) or (self.case.operation in BROKEN and rc != 0)
        if rc == -9 and not late and not any(w in self.fault for w in ("kill", "crash")):
            problems.append("was killed by nobody")
        if rc == 1 and self.fault != "sigint-twice" and "limosa-nofile" not in self.fault:
            problems.append(f"an internal error: {found.short()}")
        codes: tuple[int, ...] = ()
        if self.hazard is not None and self.told["happened"] and self.case.victim not in ACTS:
            codes = self.hazard.codes
        if "member-killed" in self.fault:
            codes = (0, 21, -9)
            if self.case.victim in ranks.VICTIMS:  # whose agent ends all of them
                codes += (10, 13)
        if codes and rc not in codes and self.case.operation not in BROKEN:
            problems.append(f"exit code {rc}, not one of {codes}: {found.short()}")
        if rc == 40 and not self._may_fail_to_undo():
            problems.append(f"could not undo: {found.short()}")
        if rc not in (*range(0, 3), *range(10, 25), 40, 41, -9) and not early:
            problems.append(f"exit code {rc} is none: {found.short()}")
        if self.for_good and self.case.step.startswith("disk") and room.litter():
            unfinished = True  # what could not be removed is recover's
        if unfinished:
            again = room.operate(["recover", "-o", "json"], points=False, boxed=self.case.boxed)
            problems += room.settle()
            errors = [one for one in again.answer.get("recovered", []) if one["exit_code"] not in (0, 41)]
            self.told["recovered"] = again.rc
            self.recovered += [one["did"] for one in again.answer.get("recovered", [])]
            if again.rc not in (0, 41) or errors:
                problems.append(f"recover failed: {again.rc} {errors or again.short()} {again.stderr[-300:]}")
        kept = ("disk.",) if self.case.operation in BROKEN else ("disk.rmdir", "disk.unlink")
        if self.kills_job or self.case.step.startswith(kept):
            self._remove_kept()
        left = room.litter()
        if left:
            words = [p.read_bytes()[-200:] for p in self.room.runtime.glob("*/journals/*.jsonl")]
            problems.append(f"left lying about: {left} {words}")
        if self.case.victim in ranks.VICTIMS and self.kills_job and self.told["happened"]:  # the agent ends the others
            _until(lambda: not self.jobs[0].alive(), 2.0)
        now, promised, before = self._now(), self._promised(), self.before
        image = self.whole_image()
        self.told["state"] = now[0][0]
        wanted: list[tuple[str, list[int]]]
        if unfinished or self.case.operation in BROKEN:
            wanted = [before[0], promised]
            if 41 in (rc, self.told.get("recovered")):
                wanted.append(("checkpointed", []))
                wanted.append(("away", self.places))
        elif rc == 0:
            wanted = [promised]
        elif rc == 41:
            wanted = [("away", self.places) if self.operation in parked.MEMORY_ONLY else ("checkpointed", [])]
        else:
            wanted = [before[0]]
        if self.kills_job and now[0][0].startswith(("gone", "mixed")):
            wanted.append(now[0])
        if self.case.parked and now[0] not in wanted:  # who was killed lets go of its GPUs a moment later
            _until(lambda: self._now()[0] in wanted, 2.0)
            now = self._now()
        if now[0] not in wanted and not self._excused(now[0]):
            seen = room.on_gpus()
            time.sleep(0.1)
            later = f"{self._now()[0]}; on the GPUs {seen}, 0.1 s later {room.on_gpus()}"
            problems.append(
                f"exit code {rc}, and the job is {now[0]} instead of {wanted} ({found.short()}), then {later}"
            )
        if now[0][0] == "gone" and self.operation == "checkpoint" and not image and not self.kills_job:
            problems.append("the job is gone and there is no image")
        if rc == 0 and self.case.operation in ("checkpoint", "leave-running") and not image:
            problems.append("success, and there is no image")
        if image and self.operation not in ("checkpoint", "leave-running"):
            problems.append("an image that nobody asked for")
        named = bool(self.found and self.found.error.get("image"))
        if image and rc in range(2, 40) and not named and self.case.operation not in BROKEN:
            problems.append(f"exit code {rc} says nothing of the image that is there")
        records = room.suspended_records()
        if now[0][0] == "running" and records:
            problems.append(f"the job runs and is noted as suspended: {records}")
        if now[0][0] in ASIDE and not records and not self._excused(now[0]):
            problems.append("the job is suspended and not noted as such")
        if self.case.parked:
            self._judge_parked(now[0][0])
        if self.case.victim in ranks.VICTIMS:
            self._judge_ranks(now[0], rc, unfinished=unfinished)
        grown, new = next(((one["descriptors"], one["new"]) for one in found.said if "descriptors" in one), (0, []))
        ours = [where for where in new if where.startswith(f"{room.base}/")]
        # Modules and libraries that were loaded on the way have some; after a 40 something is left to recover, with a
        # file of each process that has memory on a GPU.
        if grown > (12 + len(self.jobs[0].cuda_pids) if rc == 40 else 6) or (ours and rc != 40):
            problems.append(f"limosa itself has left {grown} descriptors open: {new}")

    def _of_ranks(self) -> list[list[int]]:
        """On which GPUs each rank has memory."""
        on = self.room.on_gpus()
        return [[gpu for gpu, who in enumerate(on) if pid in who] for pid in self.jobs[0].cuda_pids]

    def _judge_ranks(self, now: tuple[str, list[int]], rc: int, *, unfinished: bool) -> None:
        """Whoever lives and is not aside stands at no gate; all are where they were to go, or all where they were."""
        job = self.jobs[0]

        def shut() -> dict[int, str]:
            return {
                pid: how
                for pid, how in job.communicators().items()
                if how != "open" and self.room.state_of(pid) != "checkpointed"  # one that its agent has left behind
            }

        if now[0] == "running" or not job.alive():
            _until(lambda: not shut(), 1.0)
            if shut():
                self.problems.append(f"the job is {now[0]}, and ranks stand at a gate: {shut()}")
        if now[0] != "running" or not job.alive():
            return
        half = max(1, self.room.ground.gpus // 2)
        back = [[place] for place in self.places]
        there = back[::-1] if self.operation == "exchange" else back
        if self.operation in ("move", "resume-to", "restore-to"):
            there = [[(place + half) % self.room.ground.gpus] for place in self.places]
        if self.ranks_before and all(len(one) == 1 for one in self.ranks_before):  # some have changed places before
            turned = self.ranks_before
            there = [there[back.index(one)] for one in turned]
            back = turned
        elif self.operation in ("resume", "resume-to", "restore", "restore-to"):
            return  # in which order they were is not known any more
        either = unfinished or self.case.operation in BROKEN
        wanted = [back, there] if either else [there] if rc == 0 else [back]
        if self._of_ranks() not in wanted and not self._excused(now):
            self.problems.append(f"exit code {rc}, and the ranks are on {self._of_ranks()} instead of {wanted}")

    def _judge_parked(self, state: str) -> None:
        """The vault holds what is aside, of jobs that are suspended, and nothing else; memory is where the job is."""

        def wrong() -> list[str]:
            return [key for key in held() if not (key.startswith("aside/") and (state in ASIDE or rests(key)))]

        def rests(key: str) -> bool:
            # Of a suspended job of which a process was ended the others stay suspended: it is their only copy.
            from limosa.errors import LimosaError
            from limosa.gpu import driver
            from limosa.parking.protocol import Stand
            from limosa.parking.shim import Shim
            from limosa.process.identity import Identity

            pid = int(key[6:].partition("@")[0])
            with contextlib.suppress(LimosaError):
                if state == "running" or str(driver.state(pid)) == "checkpointed":
                    return state != "running"
                with Shim(Identity.of(pid)) as shim:
                    return shim.hello().stand is Stand.AWAY
            return False

        _until(lambda: not wrong(), 3.0)  # they look now and then who has ended
        if wrong():
            self.problems.append(f"the job is {state}, and these are held: {wrong()}")
        if state != "running":
            return
        places = {uuid for job in self.jobs for uuid in self.room.uuids(job)}
        for job in self.jobs:
            for found in job.parked_memory():
                for uuid, away in found:
                    if away or uuid not in places:
                        self.problems.append(f"a piece of the job's memory is {'away' if away else 'on ' + uuid}")

    def _remove_kept(self) -> None:
        """``recover`` leaves to ``rm`` a dump that was whole when its job ended, and what a disk does not let go."""
        for path in (self.room.base / "images").glob(".*limosa-partial*"):
            said = any(f"kept {path}," in did for did in self.recovered)  # what lives may have been started anew
            if said or not self.jobs[0].alive() or self.case.step.startswith("disk."):
                self.room.well(["rm", str(path), "-o", "json"])

    def _may_fail_to_undo(self) -> bool:
        # A recover in which something fails says 40 and is tried again.
        broken = self.case.operation in BROKEN and (self.case.step != "run" or "kill" in self.fault)
        # Nobody knows whether a driver that has failed to resume a suspended job would take it the next time.
        resuming = self.operation in AWAKENING and self.case.step.startswith(("call.restore", "inside.restore"))
        gone = self.kills_job or "slow" in self.fault or "hang" in self.fault
        # NCCL needs memory, too, when all else is there.
        gone = gone or (self.case.victim in ranks.VICTIMS and self.fault.startswith("fill"))
        return broken or resuming or self.for_good or gone

    def _excused(self, now: tuple[str, list[int]]) -> bool:
        """A driver that says a wrong state or has lost a GPU may be believed: the job has to be whole all the same."""
        if "member-killed" in self.fault and self.case.parked:  # the rest is where it was, or where it was to go
            return now[0] in ("running", "away") and bool(now[1])
        lies = (
            self.hazard is None
            and not self.case.step.startswith("mover.")
            and self.fault.startswith(("state-", "lost-", "after-", "blind"))
        )
        return lies and now[0] in ("running", "locked", "checkpointed")

    # -- back to a running job -----------------------------------------------------------------------------------------

    def _bring_back(self) -> None:
        room, problems = self.room, self.problems
        job = self.jobs[0]
        if self.problems:
            return
        image = room.base / "images" / "image-new"
        state = room.state(job)
        gone = any(one.startswith(("gone", "mixed")) for one in (room.state(j) for j in self.jobs))
        if self.kills_job and gone and not image.exists() and self.image is None:
            for key in list(room.jobs):
                room.end(key)
            self.leaks(alone=True)
            return
        if self.kills_job and state.startswith("mixed"):  # a part of it has ended: the rest is of no use
            state = "gone"
        if state == "locked":  # excused: somebody has to let it go on
            from limosa.gpu import driver

            driver.unlock(job.pid)
            state = room.state(job)
        for other in self.jobs[1:]:
            if room.state(other) in ASIDE:
                room.well(["resume", str(other.pid), "-o", "json"])
        starves = ranks.starves(self.case.victim, self.fault) and job.storeless
        if state in ASIDE:
            try:
                room.well(["resume", str(job.pid), "-o", "json"])
            except Lost:
                if not (self.fault.startswith("lost-") and self.operation in AWAKENING):
                    raise
                losses.end(self)  # its GPU went in the middle of a restore: the driver never takes that process again
                return
        elif state == "gone" and not starves:
            job.kill()  # a child that it has left behind
            room.reap()
            path = image if image.exists() else self.image
            if path is None:
                problems.append("there is no copy of the job")
                return
            if self.image is None or self._thorough(2):
                room.well(["restore", str(path), "-o", "json"])
        if starves:  # as without Limosa
            if not _until(lambda: not job.alive(), 5.0):
                problems.append("ranks that have no store to meet at go on")
            room.end("a")
            self.leaks(alone=True)
            return
        job.look()
        if any(one.missing for one in self.jobs):
            self._all_go_on()
        if self.kills_job and any(one.alive() and len(one.session()) < one.slots for one in self.jobs):
            # The fault ended one of several processes: what is left is whole, or was brought back, and waits for it.
            for key in list(room.jobs):
                room.end(key)
            self.leaks(alone=True)
            return
        self._all_go_on()
        if job.alive():
            if self.case.victim == "forks":
                job.command("join")
            if len(job.session()) != job.slots:
                problems.append(f"processes {job.session()} instead of {job.slots}")
            # Memory comes back a moment later; threads of NCCL's open something now and then.
            patience = 1.0 if self.case.parked or self.case.victim in ranks.VICTIMS else 0.0
            if not _until(lambda: self._same_files(job), patience) and not self._sees_others():
                problems.append(f"the job has other descriptors: {_other(job.open, job.descriptors())}")
            if self.fault in parked.BUSY or self.case.victim in ranks.VICTIMS:
                _until(lambda: job.threads() == job.ran)
            if job.threads() != job.ran:
                problems.append(f"the job has {job.threads()} threads instead of {job.ran}")
            grown = job.resident() - job.size
            if grown > self._growth():
                problems.append(f"the job holds {grown >> 20} MiB more host memory than before")
        if self._thorough(5) and not problems and self.case.operation not in BROKEN:
            self._again()
        self.leaks()
        if self.image is not None and job.alive():
            job.kill()
            room.reap()
        if self._sees_others():  # and is not what the next run takes it for
            for key in list(room.jobs):
                room.end(key)

    def _sees_others(self) -> bool:
        """Whether it may have other GPUs open than before: one was lost, or what it sees could not be written."""
        return self.fault.startswith("lost-") or (self.jobs[0].known.hidden and self.case.step.startswith("disk."))

    def _growth(self) -> int:
        """Bytes of host memory by which a job may grow: what the real NCCL keeps of communicators goes up and down."""
        return (400 if self.case.victim in ranks.VICTIMS and self.room.ground.name == "real" else 40) << 20

    def _same_files(self, job: Job) -> bool:
        """Whether it has the descriptors that it began with; memory that came the parked way has one each."""
        now, before = job.descriptors(), job.open
        if not self.case.parked:
            return now == before
        ours, theirs = (Counter(kind.endswith(" device memory") for kind in kinds) for kinds in (now, before))
        others = [[kind for kind in kinds if not kind.endswith(" device memory")] for kinds in (now, before)]
        return others[0] == others[1] and abs(ours[True] - theirs[True]) <= job.known.pieces + 1

    def _all_go_on(self) -> None:
        """Every process computes, and its memory is its twin's."""
        for one in self.jobs:
            if one.alive():
                try:
                    one.goes_on()
                    one.prove()
                except Lost:
                    if not self.fault.startswith("lost-"):
                        raise
                    one.kill()  # its GPU was away while it ran there: its end, and nobody's fault
                    self.room.reap()

    def _thorough(self, of: int) -> bool:
        return self.room.random.randrange(of) == 0

    def _again(self) -> None:
        """The same command without the fault succeeds."""
        room = self.room
        if self.image is not None and self.jobs[0].alive():
            self.jobs[0].kill()
            room.reap()
        shutil.rmtree(room.base / "images" / "image-new", ignore_errors=True)
        again = self.operation
        places = room.prepare(Case(again, self.case.victim, "run", "none"))
        room.well(room.command(again, room.jobs["a"], places))
        if again in ("suspend", "suspend-memory", "toggle-down"):
            room.well(["resume", str(room.jobs["a"].pid), "-o", "json"])
        elif again == "checkpoint":
            room.well(["restore", str(room.base / "images" / "image-new"), "-o", "json"])
        for job in room.jobs.values():
            job.goes_on()
            job.prove()
        self.told["again"] = True

    def leaks(self, *, alone: bool = False) -> None:
        """Nothing is left: device memory, requests, records, processes."""
        room = self.room
        shutil.rmtree(room.base / "images" / "image-new", ignore_errors=True)
        now = self._snapshot()
        awakening = self.operation in (*AWAKENING, "resume-memory")
        came_back = self.image is not None or awakening or self.operation == "clone" or self.case.operation in BROKEN
        base = {"requests": []} if alone or came_back else self.base  # of a job that was aside the rest is its own

        def other() -> list[str]:
            return _more(base, now) if self.case.parked else [key for key in base if now[key] != base[key]]

        def is_as_before() -> bool:
            nonlocal now
            now = self._snapshot()
            return not other()

        # Some allocate and free all the time; a mover that ends takes a while.
        if not alone and room.ground.name == "soft":
            _until(is_as_before, LATER)
        if now.get("requests"):  # the next controller takes away what one that was killed has left
            from limosa.errors import LimosaError
            from limosa.gpu import driver

            with contextlib.suppress(LimosaError):
                driver.state(os.getpid())
            now = self._snapshot()
        if alone and now.get("blocks of device memory"):
            _until(lambda: not self._snapshot()["blocks of device memory"], LATER)
            now = self._snapshot()
        if room.ground.name == "soft":
            self.problems += [f"{key}: {base[key]} before, {now[key]} after" for key in other()]
            if alone and not room.jobs:
                from limosa import gpu

                mover = helper_pids().get("mover", -1)
                if (
                    any(p.pid != mover for g in gpu.inventory().gpus for p in g.processes)
                    or now["blocks of device memory"]
                ):
                    self.problems.append(f"device memory of nobody: {now}")
        # One that is being started has its parent's name, until it has its own.
        _until(lambda: not room.strangers(), LATER)
        if strangers := room.strangers():
            self.problems.append(f"processes of nobody: {strangers}")
        for record in room.suspended_records():
            self.problems.append(f"noted as suspended: {record}")


def _until(true: Callable[[], bool], limit: float = 4.0) -> bool:
    """Waits for what comes by itself; whether it has."""
    end = time.monotonic() + limit
    while not (came := true()) and time.monotonic() < end:
        time.sleep(0.01)
    return came


def _more(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Of what there is more now, or something else. Less is none's loss: a helper of the run before was there still."""
    return [key for key, was in before.items() if (now[key] > was if isinstance(was, int) else now[key] != was)]


def _other(before: list[str], now: list[str]) -> str:
    more, fewer = Counter(now) - Counter(before), Counter(before) - Counter(now)
    return f"{sorted(more.elements())} more, {sorted(fewer.elements())} fewer"


def _counts(one: dict[str, Any]) -> bool:
    """Whether it comes each time: how often a runtime is looked at while it works depends on the machine."""
    return not (one["n"] and one["point"].startswith("during"))


def _steps(found: Found) -> dict[str, Any]:
    disk: dict[str, int] = {}
    for one in found.said:
        if "disk" in one:
            disk[one["disk"]] = disk.get(one["disk"], 0) + 1
    return {
        "points": [[one["point"], one["n"], one["living"]] for one in found.said if "point" in one and _counts(one)],
        "calls": [one["call"] for one in found.said if "call" in one],
        "disk": disk,
        "seconds": round(found.seconds, 2),
    }
