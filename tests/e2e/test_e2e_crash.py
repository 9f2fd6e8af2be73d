"""SIGKILL at every point of checkpoint and restore: of limosa, of its worker, of CRIU and of CRIU's action script.

Where limosa itself died, its worker (or ``recover``) undoes or finishes what it left; where another died, limosa does
so itself. Afterwards there is one copy, running or whole on disk, nothing is left lying about, and the same command
works.

The points are those that an undisturbed run has passed (``disturbed_program.py``), so that a new step is covered
without a change here. The moment after one step and the one before the next are the same: one of them is tried; and
every third time the same command is seen through to its end before the next disturbed one. LIMOSA_CRASH=all leaves
nothing out, and takes more kinds of job.

CRIU is killed at its steps, where it waits for an answer. Between them it has code of its own in the job's processes
for moments at a time, and a SIGKILL then may end the job (docs/caveats.md); nothing but ``kill -9 CRIU`` does that.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from support import semaphore_names

from limosa.image import open_image, unfinished, verify
from limosa.operation import remove_image
from limosa.operation.journal import Header, Journal
from limosa.process.criu import network
from limosa.process.criu.find import find
from limosa.process.identity import Identity
from limosa.process.records import EndedRecord, RunRecord

ALL = os.environ.get("LIMOSA_CRASH") == "all"
CHUNKS = 3  # a test tries every third point, so that tests stay short and can run side by side

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "checkpoint": ("checkpoint", {}),
    "leave-running": ("checkpoint", {"leave_running": True}),
    "restore": ("restore", {}),
    "rewind": ("restore", {"rewind_files": True}),  # with a job that has a file open with "w"
}

JUST = ("checkpoint", "leave-running", "restore")

WHOM = {
    "limosa": ["limosa"],
    "worker": ["worker"],
    "criu": ["criu"],
    "script": ["script"],
    "worker and limosa": ["worker", "limosa"],
    "all": ["criu", "worker", "limosa"],
    "nobody": ["limosa"],  # the caller cancels instead
}

ARMED = {
    "checkpoint": ["before note commit begin", "before publish of the draft", "before note commit done"],
    "restore": ["before note criu-restore done"],
}

RACING = ("after answer", "after action")  # CRIU and its script go on by themselves then, and may have ended

pytestmark = [pytest.mark.criu, pytest.mark.timeout(300)]


def whole(path: Path) -> bool:
    """Whether there is an image, every byte of it right; fails where there is anything else."""
    if not path.exists():
        return False
    with open_image(path) as image:
        assert verify(image).ok
    return True


def members(session: int) -> int:
    """Living processes of a session."""
    count = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                fields = Path(f"/proc/{name}/stat").read_bytes().rpartition(b")")[2].split()
            except OSError:
                continue
            count += int(fields[3]) == session and fields[0] not in b"ZX"
    return count


class Job:
    """A victim that goes through disturbed operations, one after the other, and has to stay right through all."""

    def __init__(self, victim: Any, disturbed: Any, folder: Path, kind: str, who: str):
        self.victim, self.disturbed, self.folder, self.kind, self.who = victim, disturbed, folder, kind, who
        self.verb, self.options = KINDS[kind]
        victim.goes_on(2)
        self.count = members(victim.pid)
        self.image = folder / "image"
        self.run_ids: set[str] = set()
        self.tried = 0
        self.undone = 22 if who == "nobody" else 21

    def operate(self, verb: str, *args: Any, **order: Any) -> dict[str, Any]:
        found: dict[str, Any] = self.disturbed(verb, *args, **order)
        self.run_ids.update(found["run_ids"])
        return found

    def well(self, verb: str, *args: Any, **order: Any) -> dict[str, Any]:
        """An operation that must succeed."""
        found = self.operate(verb, *args, points=False, **order)
        assert found["rc"] == 0, found
        return found

    def points(self) -> list[tuple[int, str]]:
        """Where an undisturbed run can be disturbed; leaves the job ready for the first disturbed one."""
        if self.verb == "restore":
            self.well("checkpoint", self.victim.pid, self.image)
            if self.options:  # there has to be something to rewind
                self.well("restore", self.image)
                self.victim.goes_on(2)
                self.victim.kill()
            found = self.operate("restore", self.image, options=self.options)
            self.victim.goes_on(2)
            self.victim.kill()
        else:
            found = self.operate("checkpoint", self.victim.pid, self.image, options=self.options)
            if not self.options:
                self.well("restore", self.image)
            remove_image(self.image)
        assert found["rc"] == 0, found
        names = [name for name, _ in found["points"]]
        assert len(names) > 30, "what the journal notes was not seen"
        kept = []
        go_ahead = next(i for i, name in enumerate(names) if name.startswith("after answer"))
        for i, (name, living) in enumerate(found["points"]):
            same = name.startswith("after") and i + 1 < len(names) and names[i + 1].startswith("before")
            still = i < go_ahead or ("script" in living and not name.startswith(RACING))
            if "criu" in WHOM[self.who] and self.verb == "checkpoint" and not still:
                continue
            if self.who == "script" and name.startswith(RACING):
                continue
            if WHOM[self.who][0] in living and (ALL or not same):
                kept.append((i, name))
        return kept

    def try_point(self, number: int) -> None:
        """Disturbs at one point and looks at what became of it."""
        if self.verb == "restore":
            self.restore(number)
        else:
            self.checkpoint(number)

    def disturb(self, verb: str, *args: Any, number: int, **order: Any) -> dict[str, Any]:
        if self.who == "nobody":
            found = self.operate(verb, *args, cancel=number, **order)
            assert found["at"], f"nothing was cancelled: {found}"
            wanted = []
        else:
            wanted = WHOM[self.who]
            found = self.operate(verb, *args, kill={"who": wanted, "point": number}, **order)
            if found["at"].startswith(RACING) and "criu" not in found["killed"]:
                wanted = [one for one in wanted if one != "criu"]
        assert found["killed"] == wanted, f"nobody was killed: {found}"
        self.disturbed.settle(self.victim.pid)
        limosa_died = "limosa" in wanted
        assert found["died"] == limosa_died, found
        if limosa_died:
            told = self.well("recover")["result"]
            assert all(one["error"] == "" and one["exit_code"] == 0 for one in told), told
            found["recovered"] = told
            if self.who == "limosa" and self.armed(found["at"]):
                # The worker was there and knew its will: nothing was left to do.
                assert told == [], (found, told)
        assert self.disturbed.litter() == []
        assert self.well("recover")["result"] == []
        assert unfinished(self.folder) == []
        return found

    def armed(self, name: str) -> bool:
        """Whether the worker has been seen to have its will at that point: from before the commit, or after CRIU."""
        return name in ARMED[self.verb]

    def thorough(self) -> bool:
        """Whether it is time to see the same command through before the next disturbed one."""
        self.tried += 1
        return ALL or self.tried % 3 == 0

    def checkpoint(self, number: int) -> None:
        found = self.disturb("checkpoint", self.victim.pid, self.image, number=number, options=self.options)
        there = whole(self.image)
        if self.victim.alive():
            assert members(self.victim.pid) == self.count
            self.victim.goes_on(2)
            if not found["died"]:
                assert found["rc"] == self.undone or (self.options and found["rc"] == 0), found
                assert there == (found["rc"] == 0 or found["image"] is not None), found
            assert not self.left_ended()
            self.no_tables()
            if there:
                remove_image(self.image)
            if not self.thorough():
                return
            self.well("checkpoint", self.victim.pid, self.image, options=self.options)
            assert whole(self.image)
        else:
            assert not self.options, "it was to be left running"
            assert there, f"the job has ended and there is no image: {found}"
            assert members(self.victim.pid) == 0
            assert found["died"] or found["rc"] == 0, found
        if not self.options:
            self.well("restore", self.image)
        self.victim.goes_on(2)
        self.no_tables()
        remove_image(self.image)

    def restore(self, number: int) -> None:
        before = self.files()
        found = self.disturb("restore", self.image, number=number, options=self.options)
        assert whole(self.image)
        if not found["died"]:
            assert self.victim.alive() == (found["rc"] == 0), found
            assert found["rc"] in (0, self.undone), found
        if not self.victim.alive():
            assert members(self.victim.pid) == 0
            assert self.files() == before, found
            if not self.thorough():
                return
            self.well("restore", self.image, options=self.options)
        assert members(self.victim.pid) == self.count
        self.victim.goes_on(2)
        self.no_tables()
        self.victim.kill()

    def files(self) -> dict[str, bytes]:
        """The file that the job has open with "w", and tails that were cut off it."""
        return {path.name: path.read_bytes() for path in self.victim.folder.glob("output*")}

    def left_ended(self) -> list[Path]:
        """What would tell ``limosa run`` that a checkpoint has ended the job, although it runs."""
        return list(self.disturbed.runtime.glob(f"*/ended/{self.victim.pid}-*"))

    def no_tables(self) -> None:
        """No nftables table of any of these runs is left while the job runs."""
        names = {f"inet CRIU-{run_id[:21]}" for run_id in self.run_ids}
        assert not names & set(network.tables(find()))

    def end(self) -> None:
        """Its last word, after all: every number was right."""
        if self.verb == "restore":
            self.well("restore", self.image, options=self.options)
        self.victim.finish()


def crash(start: Any, disturbed: Any, folder: Path, kind: str, who: str, program: str, chunk: int, chunks: int) -> None:
    job = Job(start(program), disturbed, folder, kind, who)
    points = job.points()
    assert points, f"{who} is nowhere alive in {kind}"
    if kind == "leave-running" and who != "limosa" and not ALL:
        points = points[::2]  # all but what comes after the dump is a checkpoint's too
    for number, name in points[chunk::chunks]:
        try:
            job.try_point(number)
        except Exception as error:
            raise AssertionError(f"{kind}, SIGKILL of {who} at point {number} ({name}): {error}") from error
    job.end()


@pytest.mark.parametrize("chunk", range(CHUNKS))
@pytest.mark.parametrize("who", ["limosa", "worker", "criu", "script"])
@pytest.mark.parametrize("kind", JUST)
def test_whoever_is_killed_and_wherever_one_copy_is_left_and_no_litter(
    start, disturbed, tmp_path, kind, who, chunk
) -> None:
    crash(start, disturbed, tmp_path, kind, who, "counter", chunk, CHUNKS)


@pytest.mark.parametrize("kind", JUST)
def test_cancelled_anywhere_it_is_done_or_as_it_was(start, disturbed, tmp_path, kind) -> None:
    crash(start, disturbed, tmp_path, kind, "nobody", "counter", 0, 1 if ALL else 3)


@pytest.mark.parametrize("who", ["limosa", "criu", "worker and limosa", "nobody"])
def test_files_that_were_cut_back_are_whole_again_where_the_restore_was_undone(start, disturbed, tmp_path, who) -> None:
    crash(start, disturbed, tmp_path, "rewind", who, "open_files", 0, 1 if ALL else 3)


@pytest.mark.parametrize("kind", JUST)
def test_connections_come_out_of_repair_mode_when_criu_is_killed(start, disturbed, tmp_path, kind) -> None:
    crash(start, disturbed, tmp_path, kind, "criu", "tcp_patient", 0, 1 if ALL else 2)


@pytest.mark.parametrize("kind", JUST)
def test_names_that_semaphores_had_are_there_for_criu_alone(start, disturbed, tmp_path, kind) -> None:
    job = Job(start("mp_spawn"), disturbed, tmp_path, kind, "worker and limosa")
    named = {name: number for number, name in reversed(job.points())}
    middle = "before note post-dump done" if job.verb == "checkpoint" else "before action post-resume"
    target = [job.victim.pid, job.image] if job.verb == "checkpoint" else [job.image]
    kill = {"who": ["worker", "limosa"], "point": named[middle]}
    assert job.operate(job.verb, *target, options=job.options, kill=kill)["died"]
    given_back = {p for p in semaphore_names(job.victim.pid) if not p.name.startswith("sem.mp-")}
    assert given_back
    job.well("recover")
    assert not [path for path in given_back if path.exists()]
    if not job.victim.alive():
        job.well("restore", job.image)
    job.victim.goes_on(2)
    assert all(path.name.startswith("sem.mp-") for path in semaphore_names(job.victim.pid))
    job.victim.finish()


@pytest.mark.parametrize("who", ["worker and limosa", "all"])
@pytest.mark.parametrize("kind", JUST)
def test_recover_alone_does_what_the_worker_would_have_done(start, disturbed, tmp_path, kind, who) -> None:
    crash(start, disturbed, tmp_path, kind, who, "tcp_patient", 0, 1 if ALL else 4)


def test_recover_leaves_the_table_that_keeps_the_peers_of_an_image_waiting(start, disturbed, tmp_path, echo) -> None:
    """The last answer was yes, CRIU ends the job, and nobody is there to tell."""
    victim = start("tcp_client", echo)
    job = Job(victim, disturbed, tmp_path, "checkpoint", "worker and limosa")
    options = {"tcp_established": True}
    found = job.operate("checkpoint", victim.pid, job.image, options=options)
    last = ["after answer True", [name for name, _ in found["points"]].count("after answer True")]
    job.well("restore", job.image)
    victim.goes_on(2)
    remove_image(job.image)
    kill = {"who": ["worker", "limosa"], "point": last}
    assert job.operate("checkpoint", victim.pid, job.image, options=options, kill=kill)["died"]
    disturbed.settle(victim.pid)
    (told,) = job.well("recover")["result"]
    assert (told["state"], told["error"]) == ("gone", "")
    with open_image(job.image) as image:
        assert f"inet {image.manifest.nft_table}" in network.tables(find())
    job.well("restore", job.image)
    victim.goes_on(2)
    job.no_tables()
    victim.finish()


def test_a_job_whose_restore_is_recovered_takes_nobodys_name(limosa, tmp_path, reaper) -> None:
    pid = int(limosa("run", "-d", "-q", "--name", "one", "--", "sleep", "60", rc=0).stdout)
    reaper.watch(pid)
    before = Identity.of(pid)
    limosa("checkpoint", pid, "--output", tmp_path / "image", rc=0)
    limosa("restore", tmp_path / "image", rc=0)
    job, dead = Identity.of(pid), Identity(2**22 - 1, 1)
    RunRecord(root=job, name="", command=[]).forget()
    EndedRecord(root=before, image=str(tmp_path / "image")).save()
    header = Header(id="restore-left", operation="restore", roots=[job], controller=dead, image=str(tmp_path / "image"))
    left = Journal.create(header)
    left.note("criu-restore", "done", pid)
    left.close()
    other = int(limosa("run", "-d", "-q", "--name", "one", "--", "sleep", "60", rc=0).stdout)
    assert "finished it" in limosa("recover", rc=0).stdout
    assert RunRecord.of(job).name == f"restored-{pid}"
    assert EndedRecord.of(before) is None
    for one in ("one", pid):
        limosa("stop", one, rc=0)
    assert not Path(f"/proc/{other}").exists()


@pytest.mark.parametrize("kind", JUST)
def test_recover_waits_for_a_worker_that_is_at_it_already(start, disturbed, tmp_path, kind) -> None:
    """What ``recover`` says is true when it says it: whoever recovers, it is done then."""
    job = Job(start("counter"), disturbed, tmp_path, kind, "limosa")
    named = {name: number for number, name in reversed(job.points())}
    middle = "before note post-dump done" if job.verb == "checkpoint" else "before action post-resume"
    for name in (middle, ARMED[job.verb][0]):
        target = [job.victim.pid, job.image] if job.verb == "checkpoint" else [job.image]
        kill = {"who": ["limosa"], "point": named[name]}
        assert job.operate(job.verb, *target, options=job.options, kill=kill)["died"]
        job.well("recover")
        assert disturbed.litter() == []
        assert unfinished(tmp_path) == []
        if not job.victim.alive():
            job.well("restore", job.image)
        job.victim.goes_on(2)
        if job.verb == "checkpoint" and whole(job.image):
            remove_image(job.image)
        if job.verb == "restore":
            job.victim.kill()
        disturbed.settle(job.victim.pid)
    job.end()


if ALL:

    @pytest.mark.parametrize("program", ["tree", "sockets", "mp_queue", "threads"])
    @pytest.mark.parametrize("who", ["limosa", "script"])
    @pytest.mark.parametrize("kind", JUST)
    def test_the_same_with_other_kinds_of_job(start, disturbed, tmp_path, kind, who, program) -> None:
        crash(start, disturbed, tmp_path, kind, who, program, 0, 1)
