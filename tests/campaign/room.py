"""A room: one node with its nurseries and victims, in which cases are run one after another.

A process of its own, started in a node (and a pid namespace) by the campaign; it adopts and reaps whatever its
operations leave. Orders come as lines of JSON on standard input, results go out on standard output.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support import own_network, pids, stat_of

from campaign import cases, containers, controller, ground, parked, ranks
from campaign.boxed import BoxedRun
from campaign.boxes import Boxes, BoxJob, befallen
from campaign.cases import Case
from campaign.faults import BROKEN
from campaign.helpers import helper_pids
from campaign.jobs import Job, Lost
from campaign.processes import REAL, Found, Nursery, python_path, send_signal, where_stuck
from campaign.run import Run
from campaign.shapes import SHAPES, sees

RESIDENT = ("vault", "mover")
"""Helpers that outlive an operation."""
LIMITS = {
    "LOCK_SECONDS": 1.0,
    "LOCK_GRACE": 0.5,
    "CALL_SECONDS": 1.5,
    "_PATIENCE": 4.0,
    "INIT_LIMIT": 5.0,
    "INVENTORY_LIMIT": 2.0,
}
PARKED_LIMITS = {
    "limosa.operation.parked.gates:GATE_SECONDS": 1.0,
    "limosa.operation.parked.pieces:COPY_SECONDS": 1.0,
    "limosa.parking.mover:CALL_SECONDS": 2.0,
    "limosa.parking.staging:CALL_SECONDS": 2.0,
    "limosa.parking.staging:STALL_SECONDS": 2.0,
    "limosa.parking.resident:ANSWER_SECONDS": 2.5,  # a mover that comes up beside others needs more than one
    "limosa.operation.communicators.closing:MEETING_SECONDS": 1.5,
    "limosa.operation.communicators.closing:CLOSE_SECONDS": 1.5,
    "limosa.operation.communicators.closing:JOIN_SECONDS": 2.5,
    "limosa.parking.shim:WORK_SECONDS": 1.0,
    "limosa.parking.shim:ANSWER_SECONDS": 1.0,
    "limosa.parking.shim:CONNECT_SECONDS": 1.0,
}
LIMIT = 160.0 if REAL else 25.0  # seconds that an operation may take, undo included
SETTLE = 40.0 if REAL else 15.0


class Room:
    """Runs cases; see the module."""

    def __init__(self) -> None:
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # a subreaper: what is left behind becomes ours
        self.ground = ground.here()
        if self.ground.name == "soft":
            own_network()  # nftables are one to a network namespace
        self.base = Path(tempfile.mkdtemp(prefix="campaign-", dir="/dev/shm"))
        self.runtime = self.base / "run" / "limosa"
        for name in ("run", "images", "jobs", "out", "cache"):
            (self.base / name).mkdir()
        os.environ |= {
            "LIMOSA_RUNTIME_DIR": str(self.runtime),
            "NO_COLOR": "1",
            "PYTHONPATH": python_path(),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        if self.ground.name == "soft":  # what CRIU can do is another question in every namespace
            os.environ["XDG_CACHE_HOME"] = str(self.base / "cache")
        env = dict(os.environ)
        self.victims = Nursery("victims", env)
        self.controllers = Nursery("controllers", env)
        self._preloaded: Nursery | None = None
        self._boxes: Boxes | None = None
        self._boxed: dict[str, Nursery] = {}
        self.jobs: dict[str, Any] = {}
        self.images: dict[str, Path] = {}
        self.count = 0
        self.known = {**cases.table(), **cases.table(parked.STEPS), **cases.table(ranks.STEPS)}
        self.known |= cases.table(containers.STEPS)
        self.random = random.Random(0)
        self.warm = False
        self._timers: list[tuple[float, Callable[[], None]]] = []
        self.ops = 0
        self.home: list[int] = []
        self.stopped = 0.0
        self.began = False
        self._limited: dict[int, tuple[int, int]] = {}
        self.controller_pid = 0
        self.own = {os.getpid(), self.victims.process.pid, self.controllers.process.pid, os.getppid(), 1}

    def nursery(self, shape: str) -> Nursery:
        """Where victims of that class come from: those under the shim from one that has it."""
        if not SHAPES[shape].shim:
            return self.victims
        if self._preloaded is None:
            from limosa.parking import preload
            from limosa.process.device_nodes import LIBRARY

            env = preload()
            made = Nursery("victims", {**env, "LD_PRELOAD": f"{env['LD_PRELOAD']}:{LIBRARY}"})
            self.own.add(made.process.pid)
            self._preloaded = made
        return self._preloaded

    @property
    def boxes(self) -> Boxes:
        """The container runtimes of this room."""
        if self._boxes is None:
            self._boxes = Boxes(self.base)
        return self._boxes

    def _controllers(self, boxed: bool) -> Nursery:
        """Where command lines come from: those for containers from one that finds their runtimes."""
        if not boxed:
            return self.controllers
        environment = self.boxes.environment()
        kind = environment.get("CONTAINERD_ADDRESS", "")
        if kind not in self._boxed:
            self._boxed[kind] = Nursery("controllers", {**os.environ, **environment})
            self.own.add(self._boxed[kind].process.pid)
        return self._boxed[kind]

    # -- processes ---------------------------------------------------------------------------------------------

    def reap(self) -> None:
        """Reaps whoever has ended."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, _ = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return

    def strangers(self) -> dict[int, str]:
        """Living processes here that are neither ours nor a victim's."""
        sessions = {job.pid for job in self.jobs.values()}
        mark = f"LIMOSA_RUNTIME_DIR={self.runtime}".encode()
        found = {}
        resident = {pid for name, pid in helper_pids().items() if name in RESIDENT}
        for pid in pids():
            stat = stat_of(pid)
            if pid in self.own or pid in resident or stat is None or stat[2] in "ZX" or stat[1] in sessions:
                continue
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text().startswith(("conmon", "containerd")):
                    continue  # podman's, as long as a container lives; containerd itself, and its shims
                if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")[:120]
                    found[pid] = words.decode(errors="replace")
        return found

    def settle(self, limit: float = SETTLE) -> list[str]:
        """Waits until nobody works on anything any more; says who stays."""
        end, quiet = time.monotonic() + limit, 0
        while True:
            self.reap()
            self.wake()
            left = self.strangers()
            quiet = 0 if left else quiet + 1
            if quiet == 2:
                return []
            if time.monotonic() > end:
                for pid in left:
                    with contextlib.suppress(OSError):
                        os.kill(pid, signal.SIGKILL)
                return [f"still there after {limit:g} s: {left}"]
            time.sleep(0.003 if not left else 0.01)

    def operate(self, argv: list[str], *, limit: float = LIMIT, **order: Any) -> Found:
        """Runs a command line of limosa."""
        folder = self.base / "out" / str(self.ops % 4)
        self.ops += 1
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        order = {"argv": argv, "folder": str(folder), "roots": [str(self.runtime), str(self.base / "images")], **order}
        if self.ground.name != "real":
            order.setdefault("limits", {**LIMITS, **(PARKED_LIMITS if order.get("parked") else {})})
        said: list[dict[str, Any]] = []
        begun = time.monotonic()
        controllers = self._controllers(bool(order.get("boxed")))
        controllers.send(order)
        end, killed, ended = begun + limit, False, None
        self.began = False
        pid = 0
        while ended is None:
            message = controllers.read(0.005)
            self.reap()
            self.wake()
            now = time.monotonic()
            for timer in [t for t in self._timers if t[0] <= now]:
                self._timers.remove(timer)
                with contextlib.suppress(OSError):
                    timer[1]()
            if "controller" in message:
                pid = message["controller"]
                self.controller_pid = pid
            elif "ended" in message:
                ended = message
            elif message:
                self.began = self.began or "began" in message
                said.append(message)
                if "victim" in message:
                    with contextlib.suppress(OSError, Lost):
                        self.behave(message["victim"])
            if now > end and not killed and pid:
                killed = True
                said.append({"late": limit, "stack": where_stuck(pid)})
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        self.controller_pid = 0
        last, self._timers = self._timers, []
        for timer in last:
            timer[1]()
        self._timers.clear()
        stderr = (folder / "stderr").read_text(errors="replace")[-1500:]
        return Found(argv, ended["ended"], controller.answer(str(folder)), said, ended["seconds"], stderr)

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        """Something that happens while the next operation is under way, or at its end at the latest."""
        self._timers.append((time.monotonic() + seconds, what))

    def wake(self) -> None:
        """Somebody lets a stopped victim go on, again where CRIU has stopped it as it found it."""
        if self.stopped and time.monotonic() - self.stopped > 0.4 and "a" in self.jobs:
            pid = self.jobs["a"].stoppable
            stat = stat_of(pid)
            if stat is not None and stat[2] in "Tt":
                send_signal(pid, signal.SIGCONT)

    def behave(self, what: str) -> None:
        """The victim does what its class does, or dies."""
        job = self.jobs["a"]
        flag = self.base / "out" / "flag"
        if SHAPES[job.shape].box and not what.endswith("-nofile"):
            befallen(self, what)
        elif what in ("exit", "fork", "spin", "callback"):
            job.command(what, 1.0)
        elif what == "stop-for-good":
            send_signal(job.stoppable, signal.SIGSTOP)
        elif what.endswith("-nofile"):
            self.no_files(job.cuda_pids if what == "job-nofile" else [helper_pids().get("vault", 0)])
        elif what == "stop":
            self.stopped = time.monotonic()
            send_signal(job.stoppable, signal.SIGSTOP)
        elif what == "killed":
            send_signal(job.pid, signal.SIGKILL)
        elif what == "member-killed":
            send_signal(job.cuda_pids[1], signal.SIGKILL)
            if not job.known.ranks:  # whose agent ends all
                job.missing.add(1)
        elif what == "store-gone":
            job.lose_store()
        elif what.startswith("fill"):
            half = max(1, self.ground.gpus // 2)
            wanted = {(p + half) % self.ground.gpus for p in self.home} | (
                set(self.home) if what == "fill-both" else set()
            )
            assert isinstance(self.ground, ground.Soft)
            self.ground.fill(sorted(wanted))
        self.reap()
        flag.touch()

    def no_files(self, doomed: list[int]) -> None:
        """These may open no more files, until ``files_again``."""
        for pid in filter(None, doomed):
            with contextlib.suppress(OSError):
                most = max(map(int, os.listdir(f"/proc/{pid}/fd"))) + 1
                self._limited[pid] = resource.prlimit(pid, resource.RLIMIT_NOFILE)
                resource.prlimit(pid, resource.RLIMIT_NOFILE, (most, self._limited[pid][1]))

    def files_again(self) -> None:
        """Whoever could open no files can again."""
        for pid, before in self._limited.items():
            with contextlib.suppress(OSError):
                resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
        self._limited.clear()

    # -- what is there -------------------------------------------------------------------------------------------

    def state(self, job: Job) -> str:
        """ "gone", "running", "locked", "checkpointed", "mixed"; of a job without CUDA state "running".

        "away": the driver takes it for running, and its memory alone is aside.
        """
        if not job.alive():
            return "gone"
        if not any(job.known.processes):
            return "running"
        states = {self.state_of(pid) for pid in job.cuda_pids}
        if states == {"running"} and job.stands() == {"away"}:
            return "away"
        return states.pop() if len(states) == 1 else "mixed " + " ".join(sorted(states))

    def state_of(self, pid: int) -> str:
        """The driver's, of one process."""
        from limosa.errors import LimosaError
        from limosa.gpu import driver

        try:
            return str(driver.state(pid))
        except LimosaError as error:
            return "gone" if error.exit_code == 10 or not os.path.exists(f"/proc/{pid}") else str(error)

    def places(self, job: Job) -> list[int]:
        """The GPUs on which it holds memory."""
        if not self.ground.gpus:
            return []
        from limosa import gpu

        held = set(job.cuda_pids)
        return [g.index for g in gpu.inventory().gpus if any(p.pid in held for p in g.processes)]

    def uuids(self, job: Job) -> list[str]:
        """The same by UUID."""
        from limosa import gpu

        held = set(job.cuda_pids)
        return [g.uuid for g in gpu.inventory().gpus if any(p.pid in held for p in g.processes)]

    def on_gpus(self) -> list[dict[int, int]]:
        """Who is on each GPU, with how many bytes."""
        if not self.ground.gpus:
            return []
        from limosa import gpu

        return [{p.pid: p.memory_used or 0 for p in g.processes} for g in gpu.inventory().gpus]

    def litter(self) -> list[str]:
        """What operations under way leave on disk, and what they must not leave when they have ended."""
        found = [
            str(p.relative_to(self.runtime))
            for k in ("journals", "claims")
            for p in self.runtime.glob(f"*/{k}/*")
            if p.stat().st_size  # what could not be removed is emptied
        ]
        found += [str(p) for p in self.runtime.glob("*/lent/*")]
        found += [p.name for p in self.runtime.rglob("*.new")] + [p.name for p in self.runtime.rglob(".*")]
        found += [p.name for p in (self.base / "images").iterdir() if not p.name.startswith("image-")]
        return found

    def words_of(self, litter: list[str]) -> list[bytes]:
        """The ends of what lies about: whose it is."""
        found = []
        for name in litter:
            with contextlib.suppress(OSError):
                found.append((self.runtime / name).read_bytes()[-300:])
        return found

    def suspended_records(self) -> list[str]:
        """Notes about suspended jobs that live."""
        from limosa.process.records import SuspendRecord

        return [f"process {record.root.pid}" for record in SuspendRecord.all()]

    # -- preparing -----------------------------------------------------------------------------------------------

    def job(self, key: str, shape: str, first: int = 0) -> Job:
        """A running victim of that class, the one that is there where it is whole."""
        job = self.jobs.get(key)
        if job is not None:
            job.look()
        if job is not None and job.shape == shape and not job.missing and self.state(job) == "running":
            return job
        if job is not None:
            self.end(key)
        self.count += 1
        if SHAPES[shape].box:
            made: Any = BoxJob(self.boxes, shape, first)
        else:
            made = Job(self.nursery(shape), shape, self.base / "jobs" / str(self.count), first)
        self.jobs[key] = job = made
        if SHAPES[shape].hidden:
            self.remember(job)
        return job

    def remember(self, job: Job) -> None:
        """Notes a job as ``limosa run --gpus`` does."""
        from limosa.process.identity import Identity
        from limosa.process.records import RunRecord

        RunRecord(
            root=Identity.of(job.pid),
            name=f"job{self.count}",
            command=["victim"],
            log=str(job.folder / "log"),
            cwd=str(job.folder),
            supervisor=None,
            sees=str(sees(job.folder)),
        ).save()

    def end(self, key: str) -> None:
        """Ends a victim."""
        job = self.jobs.pop(key, None)
        if job is not None:
            job.end()
            self.reap()
            sees(job.folder).unlink(missing_ok=True)
            self.ground.wait_for_memory()
            shutil.rmtree(job.folder, ignore_errors=True)
            self.images.pop(f"{key}-{job.shape}", None)

    def well(self, argv: list[str], **order: Any) -> Found:
        """A command line that has to succeed."""
        parked_job = any(SHAPES[job.shape].shim for job in self.jobs.values())
        boxed = any(SHAPES[job.shape].box for job in self.jobs.values())
        found = self.operate(argv, points=False, **{"parked": parked_job, "boxed": boxed, **order})
        if found.rc != 0:
            raise Lost(f"an undisturbed {' '.join(argv)} failed: {found.short()} {found.stderr[-300:]}")
        return found

    def image_of(self, shape: str) -> Path:
        """An image of a victim of that class, which has ended."""
        job = self.jobs.get("a")
        path = self.images.get(f"a-{shape}")
        if job is not None and job.shape == shape and path is not None and path.exists():
            job.kill()
            self.reap()
            return path
        job = self.job("a", shape)
        path = self.base / "images" / f"image-{self.count}"
        shutil.rmtree(path, ignore_errors=True)
        self.well(["checkpoint", job.called, "--output", str(path), "-o", "json"])
        self.images[f"a-{shape}"] = path
        return path

    def there(self, places: list[int]) -> str:
        """Where a job on these GPUs goes: the other half of the node."""
        half = max(1, self.ground.gpus // 2)
        if len(places) == 1:
            return f"--to={(places[0] + half) % self.ground.gpus}"
        if self.ground.gpus == 2:
            return "--map=0=1,1=0"
        return "--map=" + ",".join(f"{p}={(p + half) % self.ground.gpus}" for p in places)

    def command(self, operation: str, job: Job, places: list[int]) -> list[str]:
        """The command line of an operation."""
        pid = job.called
        new = str(self.base / "images" / "image-new")
        known = {
            "move": lambda: ["move", pid, self.there(places)],
            "swap": lambda: ["move", pid, str(self.jobs["b"].pid), "--swap"],
            "exchange": lambda: ["move", pid, f"--map={places[0]}={places[1]},{places[1]}={places[0]}"],
            "suspend": lambda: ["suspend", pid],
            "resume": lambda: ["resume", pid],
            "suspend-memory": lambda: ["suspend", pid, "--release=memory-only"],
            "resume-memory": lambda: ["resume", pid],
            "resume-to": lambda: ["resume", pid, self.there(places)],
            "toggle-down": lambda: ["toggle", pid],
            "toggle-up": lambda: ["toggle", pid],
            "checkpoint": lambda: ["checkpoint", pid, "--output", new],
            "leave-running": lambda: ["checkpoint", pid, "--output", new, "--leave-running"],
            "restore": lambda: ["restore", str(self.images[f"a-{job.shape}"])],
            "restore-to": lambda: ["restore", str(self.images[f"a-{job.shape}"]), self.there(places)],
        }
        if operation in BROKEN:
            return ["recover", "-o", "json"]
        if operation == "clone":
            return [
                *self.boxes.clone_words(job, self.base / "images" / "image-clone"),
                self.there(places),
                "-o",
                "json",
            ]
        return [*known[operation](), "-o", "json"]

    def prepare(self, case: Case) -> list[int]:
        """Brings the victims to where the operation begins; the GPUs that the job is on (or was)."""
        operation, _ = BROKEN.get(case.operation, (case.operation, ""))
        if "b" in self.jobs and operation != "swap":
            self.end("b")
        if "a" in self.jobs and self.jobs["a"].storeless:
            self.end("a")
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.base / "images" / "image-new")
        if operation in ("restore", "restore-to"):
            path = self.image_of(case.victim)
            return self.image_places(path)
        job = self.job("a", case.victim)
        places = self.places(job)
        if len(places) != SHAPES[case.victim].gpus and self.ground.gpus:  # what went before has torn it apart
            self.end("a")
            job = self.job("a", case.victim)
            places = self.places(job)
        if operation == "swap":
            there = (places[0] + max(1, self.ground.gpus // 2)) % self.ground.gpus
            other = self.jobs.get("b")
            if other is None or self.state(other) != "running" or self.places(other) != [there]:
                self.end("b")
                self.job("b", case.victim if case.parked else "one", there)
        if operation in ("resume", "resume-to", "toggle-up"):
            self.well(["suspend", job.called, "-o", "json"])
        elif operation == "clone":
            path = self.base / "images" / "image-clone"
            shutil.rmtree(path, ignore_errors=True)
            self.well(["checkpoint", job.called, "--leave-running", "--output", str(path), "-o", "json"])
        elif operation == "resume-memory":
            self.well(["suspend", str(job.pid), "--release=memory-only", "-o", "json"])
        return places

    def kill_a_restored_one(self) -> None:
        """Somebody else's job is moved there and back to where it runs, and killed."""
        other = self.job("c", "one", 1 % max(1, self.ground.gpus))
        for call in ("suspend", "resume"):
            self.well([call, str(other.pid), "-o", "json"])
        self.end("c")

    def image_places(self, path: Path) -> list[int]:
        """The GPUs that an image's job was on."""
        if not self.ground.gpus:
            return []
        from limosa import gpu
        from limosa.image import open_image

        with open_image(path) as image:
            held = {uuid for process in image.manifest.tree for uuid in process.held}
        return [g.index for g in gpu.inventory().gpus if g.uuid in held]

    # -- running -------------------------------------------------------------------------------------------------

    def run(self, case: Case, seed: int, *, record: bool = False) -> dict[str, Any]:
        """Runs a case and says what came of it."""
        begun = time.monotonic()
        self.random = random.Random(zlib.crc32(case.name.encode()) + seed)
        problems: list[str] = []
        found: Found | None = None
        told: dict[str, Any] = {}
        try:
            run = BoxedRun(self, case, record) if case.boxed else Run(self, case, record)
            problems = run.go()
            found, told = run.found, run.told
        except (Lost, AssertionError, RuntimeError, OSError) as error:
            problems = [f"{type(error).__name__}: {error}"]
            found = run.found if "run" in locals() else None
        with contextlib.suppress(Exception):
            self.ground.disarm()
        result = {
            "name": case.name,
            "seed": seed,
            "problems": problems,
            "rc": found.rc if found else None,
            "at": found.at if found else [],
            "short": found.short() if found else "",
            "seconds": time.monotonic() - begun,
            **told,
        }
        if problems:
            result["stderr"] = found.stderr if found else ""
            result["said"] = found.said[-20:] if found else []
            self.reset()
        return result

    def reset(self) -> None:
        """Nothing of what was is kept."""
        self.stopped = 0.0
        self.files_again()
        with contextlib.suppress(Exception):
            self.ground.disarm()
        for key in list(self.jobs):
            with contextlib.suppress(Exception):
                send_signal(self.jobs[key].pid, signal.SIGCONT)
                self.end(key)
        if self._boxes is not None:
            with contextlib.suppress(Exception):
                self._boxes.wipe()
        for pid in [*self.strangers(), *helper_pids().values()]:
            send_signal(pid, signal.SIGKILL)
        self.reap()
        shutil.rmtree(self.runtime, ignore_errors=True)
        for path in (self.base / "images").iterdir():
            shutil.rmtree(path, ignore_errors=True)
        self.images.clear()
        self.ground.sweep()

    def close(self) -> None:
        """Ends all that is here."""
        self.reset()
        if self._boxes is not None:
            self._boxes.close()
        for nursery in filter(None, (self.victims, self.controllers, self._preloaded, *self._boxed.values())):
            assert nursery.process.stdin is not None
            nursery.process.stdin.close()
        shutil.rmtree(self.base, ignore_errors=True)


def main() -> None:
    """Serves orders until standard input ends."""
    out = os.dup(1)
    os.dup2(2, 1)  # nothing but results goes out there
    room = Room()
    os.write(out, json.dumps({"ready": True, "ground": room.ground.name, "gpus": room.ground.gpus}).encode() + b"\n")
    try:
        for line in sys.stdin:
            order = json.loads(line)
            result = room.run(Case(*order["case"]), order["seed"], record=order.get("record", False))
            os.write(out, json.dumps(result).encode() + b"\n")
    finally:
        room.close()


if __name__ == "__main__":
    main()
