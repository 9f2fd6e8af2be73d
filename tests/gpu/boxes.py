"""Containers for the GPU tests and the benchmark, on a machine that has none: runc's, whose root is this machine's.

The root folder is an overlay of the machine's own ``/``, so that whatever is installed here is there. A container has
the device nodes of some GPUs alone, and the shim as a container runtime would bring it: by the edits of ``limosa cdi``.
Only a runc is needed, which ``scripts/gpu-carry`` makes ready to travel::

    with Boxes() as boxes:
        box = boxes.start("train", [sys.executable, "train.py", "/job"], gpus=[0])
        box.folder                            # its /job, as it is seen from here
        operation.move(box.called, to="1")

Nothing is left afterwards: processes, containers, cgroups, mounts, and the shim's folder if it was not there before.
It is the same on a node of software GPUs (``tests/containers/test_containers_as_on_gpus.py``).
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import resource
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [path for path in (str(ROOT / "tests"), str(ROOT / "tests" / "gpu")) if path not in sys.path]

from containers.runtimes import apply_cdi, bundle_config, clear_cgroups  # noqa: E402
from proofs import Job  # noqa: E402

from limosa_softgpu.state import NODE_FOLDER  # noqa: E402

CARRIED = ROOT / "build" / "carry"
LIBRARIES = Path("/run/limosa-carry")
"""Where the runc that travels looks for its library if the system has none (``scripts/gpu-carry``)."""
_SIZE = "192g"  # not a share of the memory: some machines' memory grows while it is used
_CONTROL = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools")
_PASSED_ON = ("LANG", "LD_LIBRARY_PATH", "PATH", "PYTHONPATH")
_OURS = ("PATH", "LIMOSA_CONTAINER_STATE", "XDG_DATA_HOME")
_LIMIT = 60
_DRIVERS = re.compile(r"nvidia|/libcuda|/libnv")


def find_runc() -> Path:
    """The runc that is used: $LIMOSA_RUNC, the one that was carried here, the one of ``tests/containers``."""
    given = os.environ.get("LIMOSA_RUNC", "")
    for path in (given, CARRIED / "runc", ROOT / "build" / "engines" / "bin" / "runc"):
        if path and os.path.isfile(path):
            return Path(path).resolve()
    raise AssertionError("there is no runc: run scripts/gpu-carry where there is a network, or name one by LIMOSA_RUNC")


class Box(Job):
    """One container with one job in it, whose folder is its ``/job``; ``pid``: its first process, as called here."""

    def __init__(self, boxes: Boxes, name: str, bundle: Path, pid: int, argv: Sequence[str]):
        self.boxes, self.name, self.bundle, self.pid, self.argv = boxes, name, bundle, pid, list(argv)
        # The overlay's merged side: what is written to its upper one behind its back may not be seen inside.
        self.folder = bundle / "rootfs" / "job"
        self.log = self.folder / "log"

    @property
    def called(self) -> str:
        """What a command line takes for it."""
        return f"runc:{self.name}"

    def nodes(self) -> set[str]:
        """The GPUs' device nodes that it has now."""
        names = os.listdir(f"/proc/{self.pid}/root/dev")
        return {name for name in names if name.startswith("nvidia") and name[6:].isdigit()}

    def listed(self) -> list[str]:
        """The GPUs (UUIDs) that NVML lists to a program that is started in it now."""
        asked = self.boxes._runc("exec", self.name, sys.executable, "-c", _LIST)
        return subprocess.check_output(asked, text=True, timeout=_LIMIT).split()

    def remove(self) -> None:
        """Ends it, and takes it away."""
        self.boxes.remove(self)


_LIST = """
import pynvml
pynvml.nvmlInit()
for number in range(pynvml.nvmlDeviceGetCount()):
    print(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(number)))
"""
_MONITOR = """
import ctypes, os, subprocess, sys
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
print(subprocess.run(sys.argv[1:], stdout=2).returncode, flush=True)
try:
    while True:
        os.wait()
except ChildProcessError:
    pass
"""
"""A container's parent, which reaps what ends in it at once, as podman's conmon and containerd's shim do."""


class Boxes:
    """A place for containers: a tmpfs with runc, what it notes, and the bundles; a context manager.

    Args:
        base: where that is made. Only root may be able to change it, and what is above it.
    """

    def __init__(self, base: str = "/run"):
        program = find_runc()
        self.before = {name: os.environ.get(name) for name in _OURS}
        self.boxes: list[Box] = []
        self._mounted: list[Path] = []
        self._monitors: list[subprocess.Popen[str]] = []
        self.parent = f"/limosa-boxes-{secrets.token_hex(4)}"
        self.place = Path(tempfile.mkdtemp(prefix="limosa-boxes-", dir=base))
        self._cdi_was_there = Path("/usr/local/lib/limosa").exists()
        self._lent = False
        try:
            # An overlay's two sides may not lie one in the other: this file system is none of the machine's root.
            self._mount("-t", "tmpfs", "-o", f"mode=0755,size={_SIZE}", "limosa-boxes", self.place)
            for name in ("bin", "state", "images"):
                (self.place / name).mkdir(mode=0o700)
            shutil.copy(program, self.place / "bin" / "runc")
            self._lend_library(program.parent)
            os.environ["PATH"] = f"{self.place / 'bin'}:{os.environ['PATH']}"
            os.environ["LIMOSA_CONTAINER_STATE"] = str(self.place / "state")
            if (CARRIED / "limosa" / "criu").is_dir():  # the user's private folder of CRIU, after the environment's own
                os.environ.setdefault("XDG_DATA_HOME", str(CARRIED))
            self.spec = self._cdi_spec()
        except BaseException:
            self.close()
            raise

    def _lend_library(self, beside: Path) -> None:
        """Puts the library that was carried with runc where that looks for it, if the system has none."""
        runc = [self.place / "bin" / "runc", "--version"]
        if subprocess.run(runc, capture_output=True, check=False).returncode and (beside / "lib").is_dir():
            self._lent = True
            shutil.copytree(beside / "lib", LIBRARIES, dirs_exist_ok=True)
        done = subprocess.run(runc, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"runc does not start here: {done.stderr}"

    def _cdi_spec(self) -> dict[str, Any]:
        path = self.place / "cdi.json"
        argv = [sys.executable, "-m", "limosa", "cdi", "--output", str(path)]
        done = subprocess.run(argv, capture_output=True, text=True, cwd="/", check=False)
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    def __enter__(self) -> Boxes:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- starting ------------------------------------------------------------------------------------------------

    @property
    def images(self) -> Path:
        """A folder for images, in memory."""
        return self.place / "images"

    def start(
        self,
        name: str,
        argv: Sequence[str],
        gpus: Sequence[int],
        *,
        shim: bool = True,
        env: Mapping[str, str] | None = None,
    ) -> Box:
        """Starts a container that can open these GPUs and no other; its output goes to /job/log."""
        bundle = self.place / name
        for folder in ("up/job", "work", "rootfs"):
            (bundle / folder).mkdir(parents=True)
        words = " ".join(_quoted(word) for word in argv)
        command = ["/bin/sh", "-c", f"exec {words} >>/job/log 2>&1 </dev/null"]
        config = bundle_config(name, self.parent, command, None)
        passed = {name: os.environ[name] for name in _PASSED_ON if os.environ.get(name)}
        passed |= {"HOME": "/root", "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1", **(env or {})}
        passed["PATH"] = self.before["PATH"] or passed["PATH"]
        config["process"] |= {
            "env": [f"{key}={value}" for key, value in passed.items()],
            "cwd": "/job",
            "rlimits": [{"type": "RLIMIT_NOFILE", **dict.fromkeys(("hard", "soft"), _most_files())}],
        }
        for mount in config["mounts"]:
            if mount["destination"] == "/dev/shm":
                mount["options"] = [o if not o.startswith("size=") else "size=8g" for o in mount["options"]]
        config["mounts"] += _binds(_needed())
        for node in _nodes(gpus):
            found = os.stat(node)
            number = {"type": "c", "major": os.major(found.st_rdev), "minor": os.minor(found.st_rdev)}
            config["linux"]["devices"].append({"path": node, "fileMode": 0o666, **number})
            config["linux"]["resources"]["devices"].append({"allow": True, "access": "rw", **number})
        if shim:
            apply_cdi(config, self.spec, "shim")
        (bundle / "config.json").write_text(json.dumps(config, indent=1))
        self._overlay(bundle)
        log, pid = bundle / "runc.log", bundle / "pid"
        with open(log, "w") as out:
            run = self._runc("run", "--detach", "--bundle", str(bundle), "--pid-file", str(pid), name)
            monitor = subprocess.Popen(
                [sys.executable, "-I", "-c", _MONITOR, *run],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=out, cwd="/", text=True,
            )  # fmt: skip
        self._monitors.append(monitor)
        assert monitor.stdout is not None
        assert monitor.stdout.readline() == "0\n", f"runc run: {log.read_text()}"
        return self._known(name, bundle, int(pid.read_text()), argv)

    def same_bundle(self, box: Box, name: str) -> Path:
        """Makes a bundle for a clone: the same configuration, and the root folder as it is now."""
        config = json.loads((box.bundle / "config.json").read_text())
        config["linux"]["cgroupsPath"] = f"{self.parent}/{name}"
        bundle = self.place / name
        for folder in ("work", "rootfs"):
            (bundle / folder).mkdir(parents=True)
        # With what the overlay has written down of files that are gone.
        subprocess.run(["cp", "-a", box.bundle / "up", bundle / "up"], check=True)
        (bundle / "config.json").write_text(json.dumps(config))
        self._overlay(bundle)
        return bundle

    def back(self, name: str, like: Box, bundle: Path | None = None) -> Box:
        """The container that Limosa has brought back under a name."""
        listed = json.loads(subprocess.check_output(self._runc("list", "--format", "json"), timeout=_LIMIT)) or []
        found = {one["id"]: one["pid"] for one in listed}
        assert found.get(name), f"runc knows no container {name} that runs: {listed}"
        if like in self.boxes and like.name == name:
            self.boxes.remove(like)
        return self._known(name, bundle or like.bundle, found[name], like.argv)

    def _known(self, name: str, bundle: Path, pid: int, argv: Sequence[str]) -> Box:
        box = Box(self, name, bundle, pid, argv)
        self.boxes.append(box)
        return box

    def _overlay(self, bundle: Path) -> None:
        layers = f"lowerdir=/,upperdir={bundle}/up,workdir={bundle}/work"
        self._mount("-t", "overlay", "overlay", "-o", layers, bundle / "rootfs")

    def _mount(self, *words: object) -> None:
        subprocess.run(["mount", *map(str, words)], check=True, timeout=_LIMIT)
        self._mounted.append(Path(str(words[-1])))

    def _runc(self, *words: str) -> list[str]:
        return [str(self.place / "bin" / "runc"), "--root", str(self.place / "state"), *words]

    # -- ending --------------------------------------------------------------------------------------------------

    def remove(self, box: Box) -> None:
        """Ends a container and takes it away; its bundle stays."""
        subprocess.run(self._runc("delete", "--force", box.name), capture_output=True, timeout=_LIMIT, check=False)
        if box in self.boxes:
            self.boxes.remove(box)

    def close(self) -> None:
        """Ends all; a second time nothing happens."""
        with contextlib.suppress(Exception):  # what is left is ended by its cgroup
            for name in os.listdir(self.place / "state"):
                subprocess.run(self._runc("delete", "--force", name), capture_output=True, timeout=_LIMIT, check=False)
        self.boxes.clear()
        clear_cgroups(self.parent)
        for monitor in self._monitors:
            with contextlib.suppress(subprocess.TimeoutExpired):
                monitor.communicate(timeout=_LIMIT)
        for place in reversed(self._mounted):
            # A moment later: who has just ended may still have it.
            for lazy in ([], [], [], ["--lazy"]):
                if not subprocess.run(["umount", *lazy, str(place)], capture_output=True, check=False).returncode:
                    break
                time.sleep(0.1)
        self._mounted.clear()
        for name, value in self.before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        with contextlib.suppress(FileNotFoundError):
            self.place.rmdir()
        if self._lent:
            shutil.rmtree(LIBRARIES, ignore_errors=True)
        if not self._cdi_was_there and Path("/usr/local/lib/limosa").exists():
            shutil.rmtree("/usr/local/lib/limosa", ignore_errors=True)


def _quoted(word: str) -> str:
    return "'" + word.replace("'", "'\\''") + "'"


def _most_files() -> int:
    """More than usual, as PyTorch's workers want, and no more than may be given here."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return min(hard, 65536) if hard != resource.RLIM_INFINITY else 65536


def _nodes(gpus: Sequence[int]) -> list[str]:
    names = [f"/dev/{name}" for name in (*_CONTROL, *(f"nvidia{gpu}" for gpu in gpus))]
    return [name for name in names if os.path.exists(name)]


def _needed() -> set[str]:
    """What a job here loads, wherever that is mounted: Python, its packages, this checkout, the driver's libraries."""
    found = {str(ROOT), sys.prefix, sys.base_prefix, os.path.realpath(sys.executable), "/usr/local/nvidia"}
    for name in ("torch", "transformers", "cuda"):
        spec = importlib.util.find_spec(name)
        found |= {os.path.realpath(place) for place in (spec.submodule_search_locations or () if spec else ())}
    for variable in ("PYTHONPATH", "LD_LIBRARY_PATH"):
        found |= {os.path.realpath(part) for part in os.environ.get(variable, "").split(":") if os.path.isabs(part)}
    # What was bound into this machine by NVIDIA's own tool, if it is a container itself.
    found |= {
        mount for mount in _mounts() if _DRIVERS.search(mount) and not mount.startswith(("/dev/", "/proc/", "/sys/"))
    }
    return {path for path in found if os.path.exists(path)}


def _mounts() -> set[str]:
    with open("/proc/self/mountinfo") as file:
        return {line.split()[4] for line in file} - {"/"}


def _binds(needed: Iterable[str]) -> list[dict[str, Any]]:
    """Mounts of what does not lie in the file system of the machine's root.

    Each by itself, those that lie in another one too: of a mount that came along with a folder's (rbind), CRIU does not
    know where it is to come from again.
    """
    mounts = _mounts()
    apart: set[str] = set()
    for path in needed:
        apart |= {mount for mount in mounts if mount.startswith(f"{path}/")}
        apart |= {path} if any(path == mount or path.startswith(f"{mount}/") for mount in mounts) else set()
    found = [{"destination": p, "type": "bind", "source": p, "options": ["bind", "ro"]} for p in sorted(apart)]
    if os.path.isdir(NODE_FOLDER):
        found.append({"destination": NODE_FOLDER, "type": "bind", "source": NODE_FOLDER, "options": ["rbind", "rw"]})
    return found
