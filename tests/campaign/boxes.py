"""Containers in a room: real runc and podman, their jobs as the room sees them, and what befalls them meanwhile.

Everything of the runtimes lies in the room's folder, and in cgroups below one that is called after the room, which the
campaign takes away where a room was killed.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from containers.engines import Engines
from containers.images import make_image, make_rootfs
from containers.runtimes import (
    Container,
    Containerd,
    Podman,
    Runc,
    cgroup_layouts,
    clear_cgroups,
    lay_out_cgroups,
    own_cgroups,
    own_folders,
    steps_of,
)
from support import pids, stat_of

from campaign.ground import ROOM
from campaign.jobs import PASSING, PATIENCE, Lost, UnderShim
from campaign.shapes import SHAPES

if TYPE_CHECKING:
    from campaign.room import Room

MIB, PACE, STEPS = 2, 4, 3000
TAIL = 16 << 10
_STEP = re.compile(r"step (\d+) hash (0x[0-9a-f]+)\n")
_BY_CTR = {
    "paused": '"$1" tasks pause "$2"',
    "unpaused": '"$1" tasks resume "$2"',
    "stopped": '"$1" tasks kill --signal KILL "$2"',
    "removed": '"$1" tasks delete --force "$2"; "$1" containers delete "$2"',
    "restarted": '"$1" tasks delete --force "$2"; exec "$1" tasks start --detach --log-uri "file://$3" "$2"',
}
_NODE = re.compile(r"nvidia(\d+)")


class _Here:
    """The node that this process is in, for what starts programs in one."""

    pid = 0

    def add(self, process: Any) -> None:
        """It ends with the room."""

    def run(self, argv: list[str]) -> Any:
        """Runs a program to its end."""
        return subprocess.run(argv, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)


class Boxes:
    """The runtimes of a room.

    Args:
        base: the room's folder.
    """

    def __init__(self, base: Path):
        self.base, self.engines, here = base / "boxes", Engines(), _Here()
        self._here = here
        self.base.mkdir()
        from limosa_softgpu.build import SOFTGPU

        self.rootfs = make_rootfs(self.base / "rootfs", self.engines, SOFTGPU / "libcuda.so.1")
        self._closing = contextlib.ExitStack()
        self._closing.enter_context(own_cgroups(f"limosa-room-{os.environ.get(ROOM) or os.getpid()}"))
        lay_out_cgroups(here, cgroup_layouts()[0])  # type: ignore[arg-type]
        for notes in ("/run/runc", "/run/containerd"):  # of podman's containers and containerd's: gone with the room
            os.makedirs(notes, exist_ok=True)
            here.run(["mount", "-t", "tmpfs", "-o", "mode=711", "tmpfs", notes])
        self.runc = Runc(here, self.engines, self.base / "runc", self.rootfs)  # type: ignore[arg-type]
        self.podman = Podman(here, self.engines, self.base / "podman")  # type: ignore[arg-type]
        self.parent = f"/limosa-test-{os.environ.get(ROOM) or os.getpid()}"
        self.runc.parent = self.podman.parent = self.parent
        self._daemons: Containerd | None = None
        self._loaded = self._shim = False
        self._twin: dict[int, str] = {}
        self.count = 0
        self.clone = ""
        self._cloned: Any = None
        self.acts: list[subprocess.Popen[bytes]] = []

    def environment(self) -> dict[str, str]:
        """What ``limosa`` has in its environment besides, where it works with these runtimes."""
        env = self.podman.environment()
        kept = {name: env[name] for name in env if name.startswith("CONTAINERS_") or name == "PATH"}
        if self._daemons is not None:
            kept["CONTAINERD_ADDRESS"] = str(self.containerd.socket)
        return {**kept, "LIMOSA_CONTAINER_STATE": str(self.runc.place / "state")}

    def of(self, shape: str) -> Runc | Podman | Containerd:
        """The runtime of a class of victims."""
        if SHAPES[shape].box == "runc":
            return self.runc
        if SHAPES[shape].box == "containerd":
            return self.containerd
        if not self._loaded:
            self.podman.load(self._archive())
            self._loaded = True
        return self.podman

    @property
    def containerd(self) -> Containerd:
        """containerd, whose daemon begins when it is first asked for."""
        if self._daemons is None:
            found = Containerd(self._here, self.engines, self.base / "containerd")  # type: ignore[arg-type]
            found.parent = self.parent
            found.load(self._archive())
            self._daemons = found
        return self._daemons

    def _archive(self) -> Path:
        path = self.base / "image.tar"
        return path if path.exists() else make_image(path, self.rootfs)

    @property
    def begun(self) -> list[Runc | Podman | Containerd]:
        """Those that have been used."""
        found: list[Runc | Podman | Containerd] = [self.runc]
        if self._loaded:
            found.append(self.podman)
        if self._daemons is not None:
            found.append(self._daemons)
        return found

    def devices(self, shape: str) -> dict[str, Any]:
        """What a victim of that class asks its runtime for besides."""
        if not SHAPES[shape].shim:
            return {}
        from limosa import cdi

        if not self._shim:
            own_folders(self._here, "/etc", "/usr/local/lib")  # type: ignore[arg-type]
            cdi.install_with_spec(cdi.spec_path())
            self._shim = True
        return {"cdi": [cdi.DEVICE]}

    def twin(self, last: int) -> dict[int, str]:
        """What the job computes where nobody disturbs it, as far as this step."""
        while last >= len(self._twin):
            steps = max(STEPS, 2 * last)
            found = subprocess.run(
                [self.rootfs / "job", str(MIB), "0", str(steps)],
                stdout=subprocess.PIPE,
                text=True,
                check=True,
                timeout=60,
            )
            self._twin = steps_of(found.stdout)
        return self._twin

    def new_name(self) -> str:
        """One that no container has."""
        self.count += 1
        return f"v{self.count}-{os.environ.get(ROOM) or os.getpid()}"

    def clone_words(self, job: BoxJob, image: Path) -> list[str]:
        """What has an image of a container restored beside it."""
        self.clone, self._cloned = self.new_name(), job
        words = ["restore", str(image), "--name", self.clone]
        if isinstance(job.runtime, Runc):
            words += ["--bundle", str(job.runtime.same_bundle(job.box, self.clone))]
        return words

    def end_clone(self) -> None:
        """Nothing of the clone is left."""
        self._remove(self._cloned.runtime, self.clone)
        if self._cloned.runtime is self.runc:
            self.runc.call("/bin/umount", "--lazy", self.runc.place / self.clone / "rootfs", rc=None)
        self.clone = ""

    def _remove(self, runtime: Runc | Podman | Containerd, name: str) -> None:
        if isinstance(runtime, Podman):
            runtime("rm", "--force", "--time", "0", "--ignore", name, rc=None)
        elif isinstance(runtime, Runc):
            runtime("delete", "--force", name, rc=None)
        else:
            runtime("tasks", "delete", "--force", name, rc=None)
            runtime("containers", "delete", name, rc=None)

    def shims_of_nobody(self) -> list[str]:
        """The containers that containerd has forgotten, and that a shim is still there for."""
        known, found = self.containerd.names(), []
        for pid in pids():
            with contextlib.suppress(OSError, ValueError):
                words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
                if "containerd-shim" in words[0] and str(self.containerd.socket) in " ".join(words):
                    found.append(words[words.index("-id") + 1])
        return [name for name in found if name not in known]

    def mounts(self, runtime: Runc | Podman) -> list[Path]:
        """What is mounted for a runtime's containers: roots of runc's bundles, of the folders of podman's store."""
        paths = [Path(line.split(" ")[4]) for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        return [path for path in paths if path.is_relative_to(runtime.place) and path.name in ("rootfs", "merged")]

    def wipe(self) -> None:
        """No container is left."""
        self.acts_end(5.0)
        for runtime in self.begun:
            for name in runtime.names():
                self._remove(runtime, name)
            runtime.containers.clear()
        for root in self.mounts(self.runc):
            self.runc.call("/bin/umount", "--lazy", root, rc=None)

    def act(self, argv: list[object]) -> None:
        """Somebody calls a runtime's program; it may have to wait until limosa lets go of the container."""
        process = subprocess.Popen(
            [str(word) for word in argv],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**self.podman.environment(), **self.environment()},
            cwd="/",
        )
        self.acts.append(process)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.3)

    def acts_end(self, limit: float = 25.0) -> list[str]:
        """Waits for the end of what was called; what does not end."""
        end, late = time.monotonic() + limit, []
        for process in self.acts:
            try:
                process.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                late.append(" ".join(map(str, process.args))[-200:])  # type: ignore[arg-type]
        self.acts.clear()
        return [f"these did not end in {limit:g} s: {late}"] if late else []

    def close(self) -> None:
        """Nothing of them is left."""
        self.acts_end(1.0)
        for runtime in self.begun:
            with contextlib.suppress(AssertionError, OSError, subprocess.SubprocessError):
                runtime.close()
        with contextlib.suppress(AssertionError):
            clear_cgroups(self.parent)
        self._closing.close()


class BoxJob(UnderShim):
    """One container, with what a room asks of a victim (``Job``)."""

    missing: frozenset[int] = frozenset()
    storeless = False
    slots = 1

    def __init__(self, boxes: Boxes, shape: str, first: int, name: str = ""):
        self.boxes, self.shape, self.first, self.known = boxes, shape, first, SHAPES[shape]
        self.runtime = boxes.of(shape)
        self.name = name or boxes.new_name()
        self.folder = boxes.base / "none"
        start, more = self.runtime.start_job, {} if name else boxes.devices(shape)
        box = self.runtime.known(name) if name else start("/job", MIB, PACE, gpus=(first,), name=self.name, **more)
        self._take(box)
        self.goes_on(limit=30.0)
        self.size, self.open, self.ran = self.resident(), self.descriptors(), self.threads()

    def _take(self, box: Container) -> None:
        self._box, self._log, self._began = box, box.log, self._start_time(box.pid)

    @property
    def called(self) -> str:
        """What a command line takes for it."""
        return f"{self.known.box}:{self.name}"

    # -- who it is -----------------------------------------------------------------------------------------------

    @staticmethod
    def _start_time(pid: int) -> int:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
            return int(file.read().rpartition(")")[2].split()[19])
        return 0

    def look(self) -> None:
        """Its first process may be another now: it was brought back, or started again."""
        if self._lives(self._box):
            return
        for known in list(self.runtime.containers):
            if known.name == self.name:
                self.runtime.containers.remove(known)
        with contextlib.suppress(LookupError):  # a name that went while it was asked about
            if self.name in self.runtime.names():
                self._take(self.runtime.known(self.name))

    def _lives(self, box: Container) -> bool:
        stat = stat_of(box.pid) if box.pid > 0 else None
        return stat is not None and stat[2] not in "ZX" and self._start_time(box.pid) == self._began

    @property
    def pid(self) -> int:
        """Its first process."""
        return self._box.pid

    @property
    def box(self) -> Container:
        """It, for its runtime."""
        return self._box

    @property
    def stoppable(self) -> int:
        """The same."""
        return self.pid

    @property
    def cuda_pids(self) -> list[int]:
        """The same."""
        return [self.pid]

    def alive(self) -> bool:
        """Whether that lives."""
        return self._lives(self._box)

    def session(self) -> list[int]:
        """Its processes."""
        return [self.pid] if self.alive() else []

    # -- what it does --------------------------------------------------------------------------------------------

    def goes_on(self, limit: float = PATIENCE) -> None:
        """Waits until it has done two more steps.

        Raises:
            Lost: it does not.
        """
        self.look()
        before, end = self._lines(), time.monotonic() + limit
        while self._lines() < before + 2 and time.monotonic() < end and self.alive():
            time.sleep(0.002)
        if self._lines() < before + 2:
            raise Lost(f"container {self.name} does not go on after {before} lines: {self.words()}")

    def _lines(self) -> int:
        """How much it has said, in lines as they are at most long."""
        with contextlib.suppress(OSError):
            return os.stat(self._log).st_size // 40
        return 0

    def prove(self, limit: float = PATIENCE) -> None:
        """Compares what it has computed last with what it computes undisturbed.

        Raises:
            Lost: it is something else.
        """
        with open(self._log, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL))
            words = file.read().decode(errors="replace").partition("\n")[2]
        if self.known.box == "podman":
            words = "".join(line.split(" ", 3)[-1] for line in words.splitlines(keepends=True))
        told = [(int(number), hash_) for number, hash_ in _STEP.findall(words)]
        if not told:
            raise Lost(f"container {self.name} has said no step: {words[-200:]!r}")
        twin = self.boxes.twin(max(number for number, _ in told))
        wrong = [(number, hash_, twin[number]) for number, hash_ in told if twin[number] != hash_]
        if wrong:
            raise Lost(f"container {self.name} has computed {wrong[:3]} (step, hash, the twin's)")

    def words(self) -> str:
        """Its state and what it has said."""
        with contextlib.suppress(OSError):
            return f"process {stat_of(self.pid)}, log {Path(self._log).read_bytes()[-300:]!r}"
        return "nothing"

    def descriptors(self) -> list[str]:
        """What it has open, but for GPUs: those that it has come from stay open."""
        found = []
        for fd in os.listdir(f"/proc/{self.pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/{self.pid}/fd/{fd}")
                if not target.startswith("/dev/nvidia") and not target.endswith(PASSING):
                    found.append("device memory" if "/nvidia-soft/memory" in target else target.split(":")[0])
        return sorted(found)

    def threads(self) -> int:
        """How many threads it has."""
        return len(os.listdir(f"/proc/{self.pid}/task")) if self.alive() else 0

    def resident(self) -> int:
        """Bytes of anonymous memory."""
        with open(f"/proc/{self.pid}/status") as file:
            return sum(int(line.split()[1]) << 10 for line in file if line.startswith("RssAnon"))

    def command(self, name: str, limit: float = 3.0) -> None:
        """No container is told anything."""

    # -- what befalls it -----------------------------------------------------------------------------------------

    def befall(self, what: str) -> None:
        """Somebody pauses, stops, removes or restarts it, with its runtime's own program."""
        engines = self.boxes.engines
        if self.known.box == "containerd":
            self.boxes.act(["/bin/sh", "-c", _BY_CTR[what], "sh", engines["ctr"], self.name, self._log])
            return
        podman, runc = [engines["podman"]], [engines["runc"], "--root", self.runtime.place / "state"]
        if self.known.box == "podman":
            words = {
                "paused": ["pause", self.name],
                "unpaused": ["unpause", self.name],
                "stopped": ["stop", "--time", "0", self.name],
                "removed": ["rm", "--force", "--time", "0", self.name],
                "restarted": ["restart", "--time", "0", self.name],
            }[what]
            self.boxes.act([*podman, *words])
        elif what == "restarted":
            bundle = self.runtime.place / self.name
            again = f'"$@" delete --force {self.name}; exec "$@" run --detach --bundle {bundle} {self.name}'
            self.boxes.act(["/bin/sh", "-c", again, "sh", *runc])
        else:
            words = {
                "paused": ["pause", self.name],
                "unpaused": ["resume", self.name],
                "stopped": ["kill", self.name, "KILL"],
                "removed": ["delete", "--force", self.name],
            }[what]
            self.boxes.act([*runc, *words])

    def status(self) -> str:
        """What its runtime says of it."""
        if self.known.box == "podman":
            return self.boxes.podman("inspect", "--format", "{{.State.Status}}", self.name, rc=None).stdout.strip()
        if isinstance(self.runtime, Containerd):
            return self.runtime.state(self.name)
        return str(self.boxes.runc("state", self.name).json["status"])

    def monitor(self) -> int:
        """The process by which podman looks after it."""
        stat = stat_of(self.pid)
        return stat[0] if stat is not None else 1 << 22

    def kill(self) -> None:
        """Ends it, and has the runtime forget it; what a new one is made of stays."""
        if self.monitor() == os.getpid():  # it has become ours, and podman waits until somebody has reaped it
            with contextlib.suppress(OSError):
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
        if self.name in self.runtime.names():
            if self.known.box == "podman":
                self.runtime.call(self.boxes.engines["podman"], "rm", "--force", "--time", "0", self.name)
            elif self.known.box == "containerd":
                self.runtime("tasks", "delete", "--force", self.name, rc=None)
                self.runtime("containers", "delete", self.name)
            else:
                self.thaw()
                self.runtime("delete", "--force", self.name)

    def end(self) -> None:
        """Ends it; nothing of it is left."""
        self.thaw()
        self.kill()
        if self.known.box == "runc":
            self.runtime.call("/bin/umount", "--lazy", self.runtime.place / self.name / "rootfs", rc=None)
        self.runtime.containers = [one for one in self.runtime.containers if one.name != self.name]

    # -- what of the machine is the container's ------------------------------------------------------------------

    def cgroup(self, controller: str) -> str:
        """The folder of its cgroup of a controller; "" where it has none."""
        from limosa.process.cgroups import cgroup_folders

        try:
            text, mounts = Path(f"/proc/{self.pid}/cgroup").read_text(), Path("/proc/self/mountinfo").read_text()
        except OSError:
            return ""
        return next((folder for _, folder, mount in cgroup_folders(text, mounts, controller) if folder != mount), "")

    def frozen(self) -> bool:
        """Whether it is held still by its cgroup."""
        folder = self.cgroup("freezer")
        for name, word in (("freezer.state", "THAWED"), ("cgroup.events", "frozen 0")):
            with contextlib.suppress(OSError):
                return word not in Path(folder, name).read_text()
        return False

    def thaw(self) -> None:
        """Lets it go on, whoever has frozen it."""
        folder = self.cgroup("freezer")
        for name, word in (("freezer.state", "THAWED"), ("cgroup.freeze", "0")):
            with contextlib.suppress(OSError):
                if os.path.exists(f"{folder}/{name}"):
                    Path(folder, name).write_text(word)

    def nodes(self) -> list[int]:
        """The GPUs whose device nodes it has."""
        with contextlib.suppress(OSError):
            names = os.listdir(f"/proc/{self.pid}/root/dev")
            return sorted(int(found[1]) for name in names if (found := _NODE.fullmatch(name)))
        return []

    def allowed(self, gpus: int) -> list[int]:
        """The GPUs that its device cgroup lets a program open, by one that is put into it."""
        folder = self.cgroup("devices")
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                Path(folder, "cgroup.procs").write_text(str(os.getpid()))
                found = []
                for number in range(gpus):
                    try:
                        os.open(f"/dev/nvidia{number}", os.O_RDWR)
                    except PermissionError:
                        continue
                    except OSError:  # no driver has that number: the filter has let it through
                        found.append(str(number))
                os.write(write, ",".join(found).encode())
            finally:
                os._exit(0)
        os.close(write)
        with open(read) as file:
            told = file.read()
        os.waitpid(child, 0)
        return [int(word) for word in told.split(",") if word]


def befallen(room: Room, what: str) -> None:
    """What befalls the room's container, in the middle of an operation."""
    job = room.jobs["a"]
    assert isinstance(job, BoxJob)
    if what in ("killed", "monitor-killed"):
        with contextlib.suppress(OSError):
            os.kill(job.pid if what == "killed" else job.monitor(), signal.SIGKILL)
        return
    if what == "daemon-killed":  # and somebody, systemd say, starts it again
        room.boxes.containerd.daemon.kill()
        room.boxes.containerd.daemon.wait()
        room.after(0.4, room.boxes.containerd.begin)
        return
    job.befall(what)
    if what == "paused":
        room.after(0.6, lambda: job.befall("unpaused"))
