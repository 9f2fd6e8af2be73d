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
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from support import end_session, own_network, pids, stat_of

from campaign import cases, controller, ground
from campaign.cases import Case
from campaign.jobs import Job, Lost

LIMITS = {"LOCK_SECONDS": 1.0, "LOCK_GRACE": 0.5, "CALL_SECONDS": 1.5, "_PATIENCE": 4.0, "INIT_LIMIT": 3.0}
RELEASE = 1.2  # seconds after which a driver that hangs comes back, where it does
REAL = os.environ.get("LIMOSA_CAMPAIGN") == "real"
LIMIT = 80.0 if REAL else 25.0  # seconds that an operation may take, undo included
SETTLE = 40.0 if REAL else 15.0

BROKEN = {
    "recover-move": ("move", "before note restore begin"),
    "recover-suspend": ("suspend", "after note lock done"),
    "recover-checkpoint": ("checkpoint", "before note post-dump done"),
    "recover-restore": ("restore", "before note criu-restore done"),
}


class Found(NamedTuple):
    """How a command line ended."""

    argv: list[str]
    rc: int
    answer: dict[str, Any]
    said: list[dict[str, Any]]
    seconds: float
    stderr: str

    @property
    def error(self) -> dict[str, Any]:
        """Its error, if any."""
        return self.answer.get("error") or {}

    @property
    def at(self) -> list[str]:
        """Where it was disturbed."""
        return [one["at"] for one in self.said if "at" in one]

    def short(self) -> str:
        """In a line."""
        text = self.error.get("message", "") if isinstance(self.error, dict) else self.error
        return f"{' '.join(self.argv[:1])} → {self.rc} {text}"[:400]


class Nursery:
    """The room's end of a nursery."""

    def __init__(self, kind: str, env: dict[str, str]):
        command = [sys.executable, "-m", "campaign.nursery", kind]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
        self._buffer = b""
        assert self.read(30).get("ready")

    def send(self, order: dict[str, Any]) -> None:
        """Gives an order."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        self.process.stdin.flush()

    def read(self, limit: float) -> dict[str, Any]:
        """The next line, {} where none comes in time."""
        assert self.process.stdout is not None
        fd, end = self.process.stdout.fileno(), time.monotonic() + limit
        while b"\n" not in self._buffer:
            left = end - time.monotonic()
            if left <= 0 or not select.select([fd], [], [], left)[0]:
                return {}
            chunk = os.read(fd, 1 << 16)
            if not chunk:
                raise RuntimeError("a nursery has died")
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found

    def ask(self, order: dict[str, Any], key: str, limit: float = 20) -> dict[str, Any]:
        """Gives an order and waits for its answer."""
        self.send(order)
        found = self.read(limit)
        assert key in found, found
        return found


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
            "XDG_CACHE_HOME": str(self.base / "cache"),
            "NO_COLOR": "1",
            "PYTHONPATH": f"{Path(__file__).parents[1]}:{Path(__file__).parents[2] / 'src'}",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        env = dict(os.environ)
        self.victims = Nursery("victims", env)
        self.controllers = Nursery("controllers", env)
        self.jobs: dict[str, Job] = {}
        self.images: dict[str, Path] = {}
        self.count = 0
        self.known = cases.table()
        self.random = random.Random(0)
        self.warm = False
        self._timers: list[tuple[float, Callable[[], None]]] = []
        self.ops = 0
        self.home: list[int] = []
        self.stopped = 0.0
        self.began = False
        self.controller_pid = 0
        self.own = {os.getpid(), self.victims.process.pid, self.controllers.process.pid, os.getppid(), 1}

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
        for pid in pids():
            stat = stat_of(pid)
            if pid in self.own or stat is None or stat[2] in "ZX" or stat[1] in sessions:
                continue
            with contextlib.suppress(OSError):
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
            order.setdefault("limits", LIMITS)
        said: list[dict[str, Any]] = []
        begun = time.monotonic()
        self.controllers.send(order)
        end, killed, ended = begun + limit, False, None
        self.began = False
        pid = 0
        while ended is None:
            message = self.controllers.read(0.005)
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
                said.append({"late": limit, "stack": _stack(pid)})
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        self.controller_pid = 0
        last, self._timers = self._timers, []
        for timer in last:
            timer[1]()
        self._timers.clear()
        stderr = (folder / "stderr").read_text(errors="replace")[-1500:]
        found = Found(argv, ended["ended"], controller.answer(str(folder)), said, ended["seconds"], stderr)
        return found

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        """Something that happens while the next operation is under way, or at its end at the latest."""
        self._timers.append((time.monotonic() + seconds, what))

    def wake(self) -> None:
        """Somebody lets a stopped victim go on, again where CRIU has stopped it as it found it."""
        if self.stopped and time.monotonic() - self.stopped > 0.4 and "a" in self.jobs:
            pid = self.jobs["a"].pid
            stat = stat_of(pid)
            if stat is not None and stat[2] in "Tt":
                _signal(pid, signal.SIGCONT)

    def behave(self, what: str) -> None:
        """The victim does what its class does, or dies."""
        job = self.jobs["a"]
        flag = self.base / "out" / "flag"
        if what in ("exit", "fork"):
            job.command(what, 1.0)
        elif what == "stop":
            self.stopped = time.monotonic()
            _signal(job.pid, signal.SIGSTOP)
        elif what == "killed":
            _signal(job.pid, signal.SIGKILL)
        elif what.startswith("fill"):
            half = max(1, self.ground.gpus // 2)
            wanted = {(p + half) % self.ground.gpus for p in self.home} | (
                set(self.home) if what == "fill-both" else set()
            )
            assert isinstance(self.ground, ground.Soft)
            self.ground.fill(sorted(wanted))
        self.reap()
        flag.touch()

    # -- what is there -------------------------------------------------------------------------------------------

    def state(self, job: Job) -> str:
        """ "gone", "running", "locked", "checkpointed", "mixed"; of a job without CUDA state "running"."""
        if not job.alive():
            return "gone"
        if not any(job.known.processes):
            return "running"
        from limosa.errors import LimosaError
        from limosa.gpu import driver

        states = set()
        for pid in job.cuda_pids:
            try:
                states.add(str(driver.state(pid)))
            except LimosaError as error:
                states.add("gone" if error.exit_code == 10 or not os.path.exists(f"/proc/{pid}") else str(error))
        return states.pop() if len(states) == 1 else "mixed " + " ".join(sorted(states))

    def places(self, job: Job) -> list[int]:
        """The GPUs on which it holds memory."""
        if not self.ground.gpus:
            return []
        from limosa import gpu

        held = set(job.cuda_pids)
        return [g.index for g in gpu.inventory().gpus if any(p.pid in held for p in g.processes)]

    def used(self) -> list[int]:
        """Bytes in use on each GPU."""
        if not self.ground.gpus or self.ground.name == "real":
            return []
        from limosa import gpu

        return [g.memory_used for g in gpu.inventory().gpus]

    def litter(self) -> list[str]:
        """What operations under way leave on disk, and what they must not leave when they have ended."""
        found = [
            str(p.relative_to(self.runtime))
            for k in ("journals", "claims")
            for p in self.runtime.glob(f"*/{k}/*")
            if p.stat().st_size  # what could not be removed is emptied
        ]
        found += [p.name for p in self.runtime.rglob("*.new")] + [p.name for p in self.runtime.rglob(".*")]
        found += [p.name for p in (self.base / "images").iterdir() if not p.name.startswith("image-")]
        return found

    def suspended_records(self) -> list[str]:
        """Notes about suspended jobs that live."""
        from limosa.process.records import SuspendRecord

        return [f"process {record.root.pid}" for record in SuspendRecord.all()]

    # -- preparing -----------------------------------------------------------------------------------------------

    def job(self, key: str, shape: str, first: int = 0) -> Job:
        """A running victim of that class, the one that is there where it is whole."""
        job = self.jobs.get(key)
        if job is not None and job.shape == shape and self.state(job) == "running":
            return job
        if job is not None:
            self.end(key)
        self.count += 1
        job = Job(self.victims, shape, self.base / "jobs" / str(self.count), first)
        self.jobs[key] = job
        return job

    def end(self, key: str) -> None:
        """Ends a victim."""
        job = self.jobs.pop(key, None)
        if job is not None:
            end_session(job.pid)
            self.reap()
            shutil.rmtree(job.folder, ignore_errors=True)
            self.images.pop(f"{key}-{job.shape}", None)

    def well(self, argv: list[str], **order: Any) -> Found:
        """A command line that has to succeed."""
        found = self.operate(argv, points=False, **order)
        if found.rc != 0:
            raise Lost(f"an undisturbed {' '.join(argv)} failed: {found.short()} {found.stderr[-300:]}")
        return found

    def image_of(self, shape: str) -> Path:
        """An image of a victim of that class, which has ended."""
        job = self.jobs.get("a")
        path = self.images.get(f"a-{shape}")
        if job is not None and job.shape == shape and path is not None and path.exists():
            if job.alive():
                job.kill()
            self.reap()
            return path
        job = self.job("a", shape)
        path = self.base / "images" / f"image-{self.count}"
        shutil.rmtree(path, ignore_errors=True)
        self.well(["checkpoint", str(job.pid), "--output", str(path), "-o", "json"])
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
        pid = str(job.pid)
        new = str(self.base / "images" / "image-new")
        known = {
            "move": lambda: ["move", pid, self.there(places)],
            "swap": lambda: ["move", pid, str(self.jobs["b"].pid), "--swap"],
            "suspend": lambda: ["suspend", pid],
            "resume": lambda: ["resume", pid],
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
        return [*known[operation](), "-o", "json"]

    def prepare(self, case: Case) -> list[int]:
        """Brings the victims to where the operation begins; the GPUs that the job is on (or was)."""
        operation, _ = BROKEN.get(case.operation, (case.operation, ""))
        if "b" in self.jobs and operation != "swap":
            self.end("b")
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.base / "images" / "image-new")
        if operation in ("restore", "restore-to"):
            path = self.image_of(case.victim)
            places = self.image_places(path)
            return places
        job = self.job("a", case.victim)
        places = self.places(job)
        if operation == "swap":
            there = (places[0] + max(1, self.ground.gpus // 2)) % self.ground.gpus
            other = self.jobs.get("b")
            if other is None or self.state(other) != "running" or self.places(other) != [there]:
                self.end("b")
                self.job("b", "one", there)
        if operation in ("resume", "resume-to", "toggle-up"):
            self.well(["suspend", str(job.pid), "-o", "json"])
        return places

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
            run = Run(self, case, seed, record)
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
        with contextlib.suppress(Exception):
            self.ground.disarm()
        for key in list(self.jobs):
            with contextlib.suppress(Exception):
                _signal(self.jobs[key].pid, signal.SIGCONT)
                self.end(key)
        for pid in self.strangers():
            _signal(pid, signal.SIGKILL)
        self.reap()
        shutil.rmtree(self.runtime, ignore_errors=True)
        for path in (self.base / "images").iterdir():
            shutil.rmtree(path, ignore_errors=True)
        self.images.clear()
        self.ground.sweep()

    def close(self) -> None:
        """Ends all that is here."""
        self.reset()
        for nursery in (self.victims, self.controllers):
            assert nursery.process.stdin is not None
            nursery.process.stdin.close()
        shutil.rmtree(self.base, ignore_errors=True)


class Run:
    """One case under way."""

    def __init__(self, room: Room, case: Case, seed: int, record: bool):
        self.room, self.case, self.seed, self.record = room, case, seed, record
        self.found: Found | None = None
        self.told: dict[str, Any] = {}
        self.problems: list[str] = []
        self.operation = BROKEN.get(case.operation, (case.operation, ""))[0]
        self.fault = case.fault

    # -- what goes wrong ------------------------------------------------------------------------------------------

    @property
    def kills_job(self) -> bool:
        """Whether the fault ends the job, or a process of it."""
        deadly = ("job-killed", "crash-target", "exit", "lost-")  # a job on a GPU that is lost ends of it
        return self.case.victim == "exits" or any(word in self.fault for word in deadly)

    @property
    def for_good(self) -> bool:
        """Whether what fails goes on failing, so that an undo may fail as well."""
        return any(word in self.fault for word in ("for-good", "lost-", "full", "state-", "blind", "file-size"))

    def order(self) -> dict[str, Any]:
        """What the controller is told, and what is armed."""
        room, case, step, fault = self.room, self.case, self.case.step.split("."), self.fault
        order: dict[str, Any] = {"record": self.record}
        flag = room.base / "out" / "flag"
        flag.unlink(missing_ok=True)
        if room.random.random() < 0.1 or self.room.ground.name == "real":
            order["worker"] = "exec"
        at: list[dict[str, Any]] = []
        names = {cases.dashed(name): name for name, _, _ in self.steps.get("points", [])}
        if step[0] == "point":
            point = {"name": names.get(step[1], step[1].replace("-", " ")), "n": int(step[2])}
            act, _, more = fault.partition("+")
            for one in filter(None, (act, more)):
                at.append({**point, **_deed(one, str(flag))})
        elif case.victim in cases.ACTS and self.steps.get("points") and self.operation not in ("restore", "restore-to"):
            at.append(self._middle(str(flag)))
        if step[0] == "call":
            room.ground.arm(self._driver_rules(step[1], int(step[2])))
        elif step[0] == "nvml":
            room.ground.arm(self._nvml_rules(int(step[1])))
        elif step[0] == "disk":
            code = cases.ERRNO[fault.removesuffix("-for-good")]
            order["disk"] = {"call": step[1], "n": int(step[2]), "errno": code, "forever": fault.endswith("for-good")}
        order["at"] = at
        if fault == "hang":
            room.after(RELEASE, room.ground.disarm)
        self._whole(order)
        return order

    def _middle(self, flag: str) -> dict[str, Any]:
        """A point in the middle of the operation, where a victim that behaves does so."""
        names = [(name, n) for name, n, _ in self.steps["points"] if name.startswith("before note")]
        name, n = names[len(names) // 3] if names else (self.steps["points"][0][0], 0)
        return {"name": name, "n": n, **_deed(cases.ACTS[self.case.victim], flag)}

    @property
    def steps(self) -> dict[str, Any]:
        """What was recorded of this operation and class of victim."""
        found: dict[str, Any] = self.room.known.get(f"{self.case.operation}/{self.case.victim}", {})
        return found

    def _driver_rules(self, call: str, n: int) -> list[str]:
        head = f"function={cases.CALLS[call]} nth={n + 1}"
        kind, _, value = self.fault.partition("-")
        if kind in ("result", "after", "state"):
            return [f"{head} {kind}={value}"]
        if self.fault in ("hang", "hang-for-good"):
            return [f"{head} hang"]
        if self.fault == "delay":
            return [f"{head} delay=0.15"]
        if self.fault == "slow":  # longer than what Limosa gives it
            return [f"{head} delay=2.6"]
        if kind == "crash":
            key = "crash-after" if self.fault.endswith("-after") else "crash"
            return [f"{head} {key}={'target' if 'target' in self.fault else 'caller'}"]
        if kind == "lost":
            half = max(1, self.room.ground.gpus // 2)
            here = self.places[0] if self.places else 0
            return [f"{head} lost={here if value == 'here' else (here + half) % self.room.ground.gpus}"]
        assert self.fault == "memory-host", self.fault
        return [f"{head} memory=host"]

    def _nvml_rules(self, n: int) -> list[str]:
        head = f"function={cases.NVML} nth={n + 1}"
        kind, _, value = self.fault.partition("-")
        if kind == "result":
            return [f"{head} result={value}"]
        if kind == "crash":
            return [f"{head} crash=caller"]
        if kind in ("hang", "delay"):
            return [f"{head} hang" if kind == "hang" else f"{head} delay=0.15"]
        gpus = self.room.ground.gpus
        if kind == "full":  # for one look at all GPUs
            return [f"function=nvmlDeviceGetMemoryInfo* nth={n * gpus + i + 1} lie=free:0" for i in range(gpus)]
        assert kind == "blind"
        return [
            f"function=nvmlDeviceGetComputeRunningProcesses* nth={n * gpus + i + 1} lie=processes:none"
            for i in range(gpus)
        ]

    def _whole(self, order: dict[str, Any]) -> None:
        """Faults of no step in particular."""
        room, (kind, _, number) = self.room, self.fault.partition(".")
        seconds = max(float(self.steps.get("seconds", 0.3)), 1.5 if room.ground.name == "real" else 0.0)
        if kind.startswith("random-"):
            moment = room.random.uniform(0, 1.1 * seconds)
            room.after(moment, lambda: self._strike(kind))
        elif kind == "timeout":
            self.extra = ["--timeout", f"{(int(number) + 0.5) / 4 * seconds:.3f}"]
        elif kind == "file-size":
            order["file_size"] = 1 << 16
        elif kind == "full-runtime":
            self.undo.append(_fill(room.runtime))
        elif kind == "full-disk":
            self.undo.append(_small(room.base / "images", (64 << 10) << (8 * int(number))))
        elif kind == "busy-target":
            pass  # another limosa works on it already: see go()

    def _strike(self, kind: str) -> None:
        pid = self.room.controller_pid
        if not pid or not self.room.began:  # not before it is what it says it is
            self.room.after(0.002, lambda: self._strike(kind) if self.room.controller_pid else None)
            return
        if kind in ("random-sigint", "random-sigterm"):
            _signal(pid, signal.SIGINT if kind.endswith("int") else signal.SIGTERM)
            return
        who = kind.removeprefix("random-kill-")
        if who in ("worker", "both"):
            for stranger in self.room.strangers():
                with contextlib.suppress(OSError):
                    if Path(f"/proc/{stranger}/comm").read_text().startswith("limosa-worker"):
                        _signal(stranger, signal.SIGKILL)
        if who in ("limosa", "both"):
            _signal(pid, signal.SIGKILL)

    # -- the case ---------------------------------------------------------------------------------------------------

    def go(self) -> list[str]:
        """Prepares, disturbs, judges, brings back; what was wrong."""
        room, case = self.room, self.case
        self.undo: list[Callable[[], None]] = []
        self.extra: list[str] = []
        self.places = room.home = room.prepare(case)
        self.image = room.images.get(f"a-{case.victim}") if self.operation in ("restore", "restore-to") else None
        self.jobs = [room.jobs["a"], *([room.jobs["b"]] if "b" in room.jobs else [])]
        for job in self.jobs:
            if job.alive() and room.state(job) == "running":
                job.goes_on()
        self.before = [(room.state(j), room.places(j)) for j in self.jobs]
        argv = room.command(self.operation if case.operation in BROKEN else case.operation, self.jobs[0], self.places)
        if case.operation in BROKEN:
            point = {"name": BROKEN[case.operation][1], "n": 0, "do": "kill", "who": ["worker", "limosa"]}
            broken = room.operate(argv, at=[point])
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
        self._fired()
        room.ground.disarm()
        self.problems += room.settle()
        room.stopped = 0.0
        for job in self.jobs:
            _signal(job.pid, signal.SIGCONT)
        if self.record:
            self.told["steps"] = _steps(self.found)
        self._judge(self.found)
        self._bring_back()
        return self.problems

    def _busy(self) -> Callable[[], None]:
        """Another operation has its hands on the job: a claim that lives."""
        from limosa.operation.claims import Claim
        from limosa.operation.jobs import tree_of
        from limosa.process.identity import Identity

        root = Identity.of(self.jobs[0].pid)
        claim = Claim(id="other", operation="move", holder=Identity.of(os.getpid()), pids=tree_of(root))
        claim.save()
        return claim.release

    def _fired(self) -> None:
        """A fault that has not happened is no test, unless the operation had come to its end before."""
        assert self.found is not None
        kind = self.case.step.split(".")[0]
        happened = bool(self.found.at)
        if kind in ("call", "nvml"):
            assert isinstance(self.room.ground, ground.Soft)
            happened = self.room.ground.has_fired()
        self.told["happened"] = happened or kind == "run"

    def _snapshot(self) -> dict[str, Any]:
        room = self.room
        return {"used": sum(room.used()), **room.ground.leftovers()}

    def _promised(self) -> tuple[str, list[int]]:
        """State and GPUs of the first job where all went well."""
        half, gpus = max(1, self.room.ground.gpus // 2), max(1, self.room.ground.gpus)
        away = sorted((p + half) % gpus for p in self.places)
        return {
            "move": ("running", away),
            "swap": ("running", away),
            "suspend": ("checkpointed", []),
            "resume": ("running", self.places),
            "resume-to": ("running", away),
            "toggle-down": ("checkpointed", []),
            "toggle-up": ("running", self.places),
            "checkpoint": ("gone", []),
            "leave-running": ("running", self.places),
            "restore": ("running", self.places),
            "restore-to": ("running", away),
        }[self.operation]

    def _now(self) -> list[tuple[str, list[int]]]:
        return [(self.room.state(j), self.room.places(j)) for j in self.jobs]

    def _whole_image(self) -> bool:
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
        late = [one for one in found.said if "late" in one]
        if late:
            problems.append(f"did not end within {LIMIT:g} s: {late}")
        crash = [one["crash"] for one in found.said if "crash" in one]
        if crash or rc in (98, 99):
            problems.append(f"crashed: {crash} {found.stderr[-300:]}")
        early = rc in (-15, -1, 130) and "random-sig" in self.fault  # before it had begun
        unfinished = early or rc in (-9, 1, 40) or (self.case.operation in BROKEN and rc != 0)
        if rc == -9 and not late and not any(w in self.fault for w in ("kill", "crash")):
            problems.append("was killed by nobody")
        if rc == 1 and self.fault != "sigint-twice":
            problems.append(f"an internal error: {found.short()}")
        if rc == 40 and not self._may_fail_to_undo():
            problems.append(f"could not undo: {found.short()}")
        if rc not in (*range(0, 3), *range(10, 25), 40, 41, -9) and not early:
            problems.append(f"exit code {rc} is none: {found.short()}")
        if self.for_good and self.case.step.startswith("disk") and room.litter():
            unfinished = True  # what could not be removed is recover's
        if unfinished:
            again = room.operate(["recover", "-o", "json"], points=False)
            problems += room.settle()
            errors = [one for one in again.answer.get("recovered", []) if one["exit_code"] not in (0, 41)]
            if again.rc not in (0, 41) or errors:
                problems.append(f"recover failed: {again.rc} {errors or again.short()} {again.stderr[-300:]}")
            self.told["recovered"] = True
        if self.kills_job:
            self._remove_kept()
        left = room.litter()
        if left:
            words = [p.read_bytes()[-200:] for p in self.room.runtime.glob("*/journals/*.jsonl")]
            problems.append(f"left lying about: {left} {words}")
        now, promised, before = self._now(), self._promised(), self.before
        image = self._whole_image()
        self.told["state"] = now[0][0]
        wanted: list[tuple[str, list[int]]]
        if unfinished or self.case.operation in BROKEN:
            wanted = [before[0], promised]
        elif rc == 0:
            wanted = [promised]
        elif rc == 41:
            wanted = [("checkpointed", [])]
        else:
            wanted = [before[0]]
        if self.kills_job and now[0][0].startswith(("gone", "mixed")):
            wanted.append(now[0])
        if now[0] not in wanted and not self._excused(now[0]):
            problems.append(f"exit code {rc}, and the job is {now[0]} instead of {wanted} ({found.short()})")
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
        if now[0][0] == "checkpointed" and not records:
            problems.append("the job is suspended and not noted as such")
        grown = next((one["descriptors"] for one in found.said if "descriptors" in one), 0)
        self.told["descriptors"] = grown

    def _remove_kept(self) -> None:
        """A dump that was whole when the job ended by itself may be its last copy: ``recover`` keeps it for ``rm``."""
        for path in (self.room.base / "images").glob(".*limosa-partial*"):
            if not self.jobs[0].alive():
                self.room.well(["rm", str(path), "-o", "json"])

    def _may_fail_to_undo(self) -> bool:
        # A recover in which something fails says 40 and is tried again.
        broken = self.case.operation in BROKEN and self.case.step != "run"
        return broken or self.for_good or self.kills_job or "slow" in self.fault or "hang" in self.fault

    def _excused(self, now: tuple[str, list[int]]) -> bool:
        """A driver that says a wrong state or has lost a GPU can be believed or not: the job must be whole all the same."""
        return self.fault.startswith(("state-", "lost-", "after-", "blind")) and now[0] in (
            "running",
            "locked",
            "checkpointed",
        )

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
            self._leaks(alone=True)
            return
        if state == "locked":  # excused: somebody has to let it go on
            from limosa.gpu import driver

            driver.unlock(job.pid)
            state = room.state(job)
        if state == "checkpointed":
            room.well(["resume", str(job.pid), "-o", "json"])
        elif state == "gone":
            path = image if image.exists() else self.image
            if path is None:
                problems.append("there is no copy of the job")
                return
            if self.image is None or self._thorough(2):
                room.well(["restore", str(path), "-o", "json"])
        for one in self.jobs:
            if one.alive():
                one.goes_on()
                one.prove()
        if job.alive():
            if self.case.victim == "forks":
                job.command("join")
            if len(job.session()) != job.slots:
                problems.append(f"processes {job.session()} instead of {job.slots}")
            grown = job.resident() - job.size
            if grown > 40 << 20:
                problems.append(f"the job holds {grown >> 20} MiB more host memory than before")
        if self._thorough(5) and not problems and self.case.operation not in BROKEN:
            self._again()
        self._leaks()
        if self.image is not None and job.alive():
            job.kill()
            room.reap()

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
        if again in ("suspend", "toggle-down"):
            room.well(["resume", str(room.jobs["a"].pid), "-o", "json"])
        elif again == "checkpoint":
            room.well(["restore", str(room.base / "images" / "image-new"), "-o", "json"])
        for job in room.jobs.values():
            job.goes_on()
            job.prove()
        self.told["again"] = True

    def _leaks(self, *, alone: bool = False) -> None:
        """Nothing is left: device memory, requests, records, processes."""
        room = self.room
        shutil.rmtree(room.base / "images" / "image-new", ignore_errors=True)
        now = self._snapshot()
        if now.get("requests"):  # the next controller takes away what one that was killed has left
            from limosa.errors import LimosaError
            from limosa.gpu import driver

            with contextlib.suppress(LimosaError):
                driver.state(os.getpid())
            now = self._snapshot()
        if room.ground.name == "soft":
            if alone or self.image is not None or self.operation in ("resume", "resume-to", "toggle-up"):
                base = {"requests": []}
            else:
                base = self.base if self.case.operation not in BROKEN else {"requests": []}
            for key, value in base.items():
                if now[key] != value:
                    self.problems.append(f"{key}: {value} before, {now[key]} after")
            if alone and not room.jobs:
                from limosa import gpu

                if any(g.processes for g in gpu.inventory().gpus) or now["blocks of device memory"]:
                    self.problems.append(f"device memory of nobody: {now}")
        if room.strangers():
            self.problems.append(f"processes of nobody: {room.strangers()}")
        for record in room.suspended_records():
            self.problems.append(f"noted as suspended: {record}")


def _steps(found: Found) -> dict[str, Any]:
    disk: dict[str, int] = {}
    for one in found.said:
        if "disk" in one:
            disk[one["disk"]] = disk.get(one["disk"], 0) + 1
    return {
        "points": [[one["point"], one["n"], one["living"]] for one in found.said if "point" in one],
        "calls": [one["call"] for one in found.said if "call" in one],
        "disk": disk,
        "seconds": round(found.seconds, 2),
    }


def _deed(fault: str, flag: str) -> dict[str, Any]:
    """What a controller does at a point."""
    who = {
        "kill-limosa": ["limosa"],
        "kill-worker": ["worker"],
        "kill-both": ["worker", "limosa"],
        "kill-criu": ["criu"],
        "kill-script": ["script"],
        "kill-all": ["criu", "worker", "limosa"],
    }
    if fault in who:
        return {"do": "kill", "who": who[fault]}
    if fault.startswith("sig"):
        name, _, twice = fault.partition("-")
        return {"do": "signal", "signals": [name.upper()] * (2 if twice else 1)}
    return {"do": "victim", "what": {"job-killed": "killed"}.get(fault, fault), "flag": flag}


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(OSError):
        os.kill(pid, number)


def _stack(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/wchan").read_text() + " " + Path(f"/proc/{pid}/syscall").read_text().strip()
    return ""


def _fill(folder: Path) -> Callable[[], None]:
    """A full disk under the runtime folder until the function that is returned is called."""
    return _small(folder, 4 << 20, full=True)


def _small(folder: Path, size: int, *, full: bool = False) -> Callable[[], None]:
    """A disk of that size in place of a folder; what is in it stays."""
    folder.mkdir(parents=True, exist_ok=True)
    beside = folder.with_name(folder.name + "-kept")
    content = sorted(folder.iterdir())
    beside.mkdir()
    for path in content:
        os.rename(path, beside / path.name)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=1777", "tmpfs", str(folder)], check=True)
    for path in sorted(beside.iterdir()):
        if not path.name.startswith("image-"):
            shutil.copytree(path, folder / path.name, symlinks=True) if path.is_dir() else shutil.copy2(
                path, folder / path.name
            )
    if full:
        with contextlib.suppress(OSError), open(folder / "filling", "wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    def undo() -> None:
        shutil.rmtree(folder / "filling", ignore_errors=True)
        with contextlib.suppress(OSError):
            os.unlink(folder / "filling")
        told = folder.with_name(folder.name + "-told")
        shutil.rmtree(told, ignore_errors=True)
        shutil.copytree(folder, told, symlinks=True)
        subprocess.run(["umount", str(folder)], check=True)
        for path in beside.iterdir():
            if path.name.startswith("image-") and not (told / path.name).exists():
                os.rename(path, told / path.name)
        for path in told.iterdir():
            os.rename(path, folder / path.name)
        shutil.rmtree(told)
        shutil.rmtree(beside, ignore_errors=True)

    return undo


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
