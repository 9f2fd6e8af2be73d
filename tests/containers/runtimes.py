"""podman and runc on a node of software GPUs, everything of theirs in a folder of the test's own.

A container gets a software GPU as it gets a real one: device nodes, the driver's libraries, and (what a kernel is
otherwise) the node's folder. It is a process of the machine like any other: ``container.pid`` is its pid outside.
Whatever is started here is ended and its cgroups are gone after ``close``.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import warm
from containers.engines import Engines
from containers.images import NAME, library_folder
from soft_node import Answer, Node

from limosa.containers import grpc
from limosa.containers.protobuf import Message, message
from limosa_softgpu.build import LIBRARIES, SOFTGPU
from limosa_softgpu.state import NODE_FOLDER

_STEP = re.compile(r"step (\d+) hash (0x[0-9a-f]+)")
_CONTROL = ("nvidiactl", "nvidia-uvm")
# No CAP_SYS_RESOURCE may be there: the limits are none that would have to be raised.
_OF_CONTAINER, _OF_NODE = 1, 2  # NamespaceMode of a pod's namespaces
_LIMITS = {"nofile": 1024, "nproc": 512}


def steps_of(words: str) -> dict[int, str]:
    """Step → hash; a step that was said twice in two ways is a failure."""
    found: dict[int, str] = {}
    for number, hash_ in _STEP.findall(words):
        assert found.setdefault(int(number), hash_) == hash_, words
    return found


class Container:
    """A container that runs; what it prints lies in ``log``."""

    def __init__(self, runtime: Runtime, id_: str, name: str, pid: int, log: Path):
        self.runtime, self.id, self.name, self.pid, self.log = runtime, id_, name, pid, log

    def said(self) -> str:
        """All that it has printed so far."""
        return self.runtime.words(self.log)

    def steps(self) -> dict[int, str]:
        """Step → hash, as far as it has come."""
        return steps_of(self.said())

    def wait_for(self, word: str, limit: float = 90) -> None:
        """Waits until it has printed that."""
        end = time.monotonic() + limit
        while word not in self.said():
            assert time.monotonic() < end, f"{self.name} has not said {word!r} in {limit} s:\n{self.said()}"
            assert self.lives() or word in self.said(), f"{self.name} has ended:\n{self.said()}"
            time.sleep(0.02)

    def goes_on(self, steps: int = 3, limit: float = 90) -> None:
        """Waits until it has done that many more steps."""
        last = max(self.steps(), default=-1)
        end = time.monotonic() + limit
        while max(self.steps(), default=-1) < last + steps:
            assert time.monotonic() < end, f"{self.name} stands still:\n{self.said()[-2000:]}"
            assert self.lives(), f"{self.name} has ended:\n{self.said()[-2000:]}"
            time.sleep(0.02)

    def lives(self) -> bool:
        """Whether its first process is there."""
        try:
            with open(f"/proc/{self.pid}/stat") as file:
                return file.read().rpartition(")")[2].split()[0] not in "ZX"
        except OSError:
            return False

    def run(self, *argv: object, rc: int | None = 0) -> Answer:
        """A program in it, to its end."""
        return self.runtime.enter(self, argv, rc)

    def remove(self) -> None:
        """Ends it; nothing of it is left. A second time nothing happens."""
        self.runtime.remove(self)


class Runtime:
    """What podman and runc have in common."""

    name = ""

    def __init__(self, node: Node, engines: Engines, place: Path):
        self.node, self.engines, self.place = node, engines, place
        place.mkdir(parents=True)
        self.parent = f"/limosa-test-{secrets.token_hex(4)}"
        self.sockets = Path(tempfile.mkdtemp(prefix="limosa-"))  # whose paths may not be long: 107 bytes
        self.containers: list[Container] = []

    def environment(self) -> dict[str, str]:
        """What its program is started with."""
        env = {k: v for k, v in os.environ.items() if k.startswith("LIMOSA_")}
        return {**env, "PATH": f"{self.engines.bin}:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": str(self.place)}

    def call(self, *argv: object, rc: int | None = 0, limit: float = 180) -> Answer:
        """Runs the runtime's program in the node."""
        begin = time.monotonic()
        # Not by pipes: what stays behind (conmon) would keep them open.
        with open(self.place / "call.out", "w+") as out, open(self.place / "call.err", "w+") as err:
            process = subprocess.Popen(
                [str(word) for word in argv],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=self.environment(),
                cwd="/",
                preexec_fn=lambda: _join(self.node.pid),  # noqa: PLW1509 - it only makes system calls
            )
            self.node.add(process)
            process.wait(limit)
            out.seek(0)
            err.seek(0)
            answer = Answer(list(map(str, argv)), process.returncode, out.read(), err.read(), time.monotonic() - begin)
        assert rc is None or answer.rc == rc, answer
        return answer

    def words(self, log: Path) -> str:
        """What a container has printed."""
        with contextlib.suppress(FileNotFoundError):
            return log.read_text()
        return ""

    def enter(self, container: Container, argv: Sequence[object], rc: int | None) -> Answer:
        """Runs a program in a container."""
        raise NotImplementedError

    def start_job(self, *command: object, **options: Any) -> Container:
        """Starts a container whose output nobody outside has a descriptor of but the runtime."""
        raise NotImplementedError

    def known(self, name: str) -> Container:
        """The container that the runtime, not this test, has started under a name."""
        raise NotImplementedError

    def names(self) -> list[str]:
        """The containers that the runtime knows, running or not."""
        raise NotImplementedError

    def has(self, name: str) -> bool:
        """Whether it knows one of that name."""
        return name in self.names()

    def remove(self, container: Container) -> None:
        """Ends a container."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends all containers and takes their cgroups away."""
        for container in list(self.containers):
            self.remove(container)
        clear_cgroups(self.parent)
        shutil.rmtree(self.sockets, ignore_errors=True)  # it may be closed twice

    def _serve(self, *argv: object) -> subprocess.Popen[bytes]:
        """Starts its daemon in the node, and waits until that answers its client."""
        with open(self.place / "daemon.log", "w") as log:
            daemon = subprocess.Popen(
                [str(word) for word in argv],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment(),
                cwd="/",
                preexec_fn=lambda: _join(self.node.pid),  # noqa: PLW1509 - it only makes system calls
            )
        self.node.add(daemon)
        end = time.monotonic() + 120
        while self("version", rc=None).rc != 0:
            assert time.monotonic() < end, (self.place / "daemon.log").read_text()
            assert daemon.poll() is None, (self.place / "daemon.log").read_text()
            time.sleep(0.1)
        return daemon

    def __call__(self, *arguments: object, rc: int | None = 0, limit: float = 180) -> Answer:
        """Runs its own program: ``runtime("ps", "--all")``."""
        raise NotImplementedError

    def _new_name(self) -> str:
        return f"c{len(self.containers)}-{secrets.token_hex(3)}"

    def _started(self, id_: str, name: str, pid: int, log: Path) -> Container:
        container = Container(self, id_, name, pid, log)
        self.containers.append(container)
        return container


class Podman(Runtime):
    """podman with a store, a network and a configuration of its own; ``runtime`` is the OCI runtime below it."""

    name = "podman"

    def __init__(self, node: Node, engines: Engines, place: Path, *, runtime: str = "runc"):
        super().__init__(node, engines, place)
        self.runtime = runtime
        etc = place / ".config" / "containers"
        etc.mkdir(parents=True)
        (etc / "policy.json").write_text('{"default": [{"type": "insecureAcceptAnything"}]}')
        (etc / "registries.conf").write_text("")
        run = self.sockets / "run"  # of 50 characters at most, else what conmon starts at a container's end fails
        (etc / "storage.conf").write_text(
            f'[storage]\ndriver = "overlay"\ngraphroot = "{place}/graph"\nrunroot = "{run}"\n'
        )
        limits = ", ".join(f'"{name}={value}:{value}"' for name, value in _LIMITS.items())
        (etc / "containers.conf").write_text(
            f"""\
[containers]
cgroupns = "private"
default_ulimits = [{limits}]
log_driver = "k8s-file"
netns = "none"
pids_limit = 0
seccomp_profile = "{engines.seccomp}"
[network]
network_backend = "netavark"
network_config_dir = "{place}/networks"
[engine]
cgroup_manager = "cgroupfs"
conmon_path = ["{engines["conmon"]}"]
events_logger = "none"
helper_binaries_dir = ["{engines.bin}"]
init_path = "{engines["catatonit"]}"
lock_type = "file"
runtime = "{runtime}"
static_dir = "{place}/graph/libpod"
tmp_dir = "{place}/tmp"
volume_path = "{place}/volumes"
[engine.runtimes]
crun = ["{engines["crun"]}"]
runc = ["{engines["runc"]}"]
"""
        )

    def environment(self) -> dict[str, str]:
        etc = self.place / ".config" / "containers"
        return {
            **super().environment(),
            "CONTAINERS_CONF": f"{etc}/containers.conf",
            "CONTAINERS_STORAGE_CONF": f"{etc}/storage.conf",
            "CONTAINERS_REGISTRIES_CONF": f"{etc}/registries.conf",
            "XDG_RUNTIME_DIR": f"{self.place}/xdg",
        }

    def __call__(self, *arguments: object, rc: int | None = 0, limit: float = 180) -> Answer:
        """``podman("ps", "--all")``."""
        return self.call(self.engines["podman"], *arguments, rc=rc, limit=limit)

    def load(self, archive: Path) -> None:
        """Puts an image into its store."""
        self("load", "--quiet", "--input", archive)

    def start(
        self,
        *command: object,
        gpus: Sequence[int] | None = (0,),
        options: Sequence[object] = (),
        cdi: Sequence[str] = (),
        env: Sequence[str] = (),
        name: str = "",
        image: str = NAME,
        own_log: bool = False,
    ) -> Container:
        """``podman run --detach``; ``options`` are more of podman's, ``gpus`` None for none of the node's.

        ``own_log``: its log goes to podman's own file, which nobody outside of the node sees.
        """
        name = name or self._new_name()
        log = self.place / f"{name}.log"
        words = [*([] if gpus is None else _gpu_options(gpus)), *_devices_and_env(cdi, env)]
        place = ["--name", name, *self.in_cgroups(), *([] if own_log else ["--log-opt", f"path={log}"])]
        id_ = self("run", "--detach", *place, *words, *options, image, *command).stdout.split()[-1]
        asked = self("inspect", "--format", "{{.State.Pid}}", id_, rc=None)
        if "no such process" in asked.stderr:  # a short one ended while podman looked at it
            asked = self("inspect", "--format", "{{.State.Pid}}", id_)
        assert asked.rc == 0, asked
        return self._started(id_, name, int(asked.stdout), log)

    def in_cgroups(self) -> list[str]:
        """The options that say in which cgroup a container is."""
        return ["--cgroup-parent", self.parent]

    def words(self, log: Path) -> str:
        # "2026-11-26T20:46:08.000000000+00:00 stdout F the words"
        return "".join(line.split(" ", 3)[-1] for line in super().words(log).splitlines(keepends=True))

    def enter(self, container: Container, argv: Sequence[object], rc: int | None) -> Answer:
        return self("exec", container.id, *argv, rc=rc)

    def start_job(self, *command: object, **options: Any) -> Container:
        return self.start(*command, **options)

    def known(self, name: str) -> Container:
        asked = self("container", "inspect", name, rc=None)
        if asked.rc and ("no such container" in asked.stderr or "container not known" in asked.stderr):
            raise LookupError(f"{name} goes while it is asked about")
        assert asked.rc == 0, asked
        (found,) = asked.json
        log = Path(found["HostConfig"]["LogConfig"]["Path"])
        return self._started(found["Id"], name, found["State"]["Pid"], log)

    def names(self) -> list[str]:
        return self("ps", "--all", "--format", "{{.Names}}").stdout.split()

    def exec_words(self, container: Container) -> list[str]:
        """What starts a program in a container, before its words."""
        return [self.engines["podman"], "exec", container.id]

    def remove(self, container: Container) -> None:
        self("rm", "--force", "--time", "0", container.id)
        self.containers.remove(container)

    def close(self) -> None:
        self("rm", "--all", "--force", "--time", "0")
        self.containers.clear()
        super().close()


class Runc(Runtime):
    """runc with bundles made by hand: the root folder is an overlay of the image's."""

    name = "runc"
    options: tuple[str, ...] = ()

    def __init__(self, node: Node, engines: Engines, place: Path, rootfs: Path):
        super().__init__(node, engines, place)
        self.rootfs = rootfs

    def __call__(self, *arguments: object, rc: int | None = 0, limit: float = 180) -> Answer:
        """``runc("list")``."""
        return self.call(self.engines[self.name], "--root", self.place / "state", *arguments, rc=rc, limit=limit)

    def bundle(
        self,
        name: str,
        command: Sequence[object],
        gpus: Sequence[int] | None = (0,),
        *,
        cdi: Sequence[str] = (),
        env: Sequence[str] = (),
        binds: Sequence[dict[str, Any]] = (),
        rootfs: Path | None = None,
        **changes: Any,
    ) -> Path:
        """Makes a bundle; ``binds`` are mounts besides, and ``changes`` replace top fields of its config.json."""
        bundle = self.place / name
        for folder in ("up", "work", "rootfs"):
            (bundle / folder).mkdir(parents=True)
        config = bundle_config(name, self.parent, [str(word) for word in command], gpus)
        for device in cdi:
            kind, _, one = device.partition("=")
            apply_cdi(config, self._spec(kind), one)
        config["process"]["env"] += env
        config["mounts"] += binds
        (bundle / "config.json").write_text(json.dumps({**config, **changes}, indent=1))
        layers = f"lowerdir={rootfs or self.rootfs},upperdir={bundle}/up,workdir={bundle}/work"
        self.call("/bin/mount", "-t", "overlay", "overlay", "-o", layers, bundle / "rootfs")
        return bundle

    def _spec(self, kind: str) -> dict[str, Any]:
        """The CDI spec of that kind in the node's /etc/cdi, as containerd would find it."""
        for path in self.node.run(["sh", "-c", "ls /etc/cdi/*.json"]).stdout.split():
            spec: dict[str, Any] = json.loads(self.node.run(["cat", path]).stdout)
            if spec["kind"] == kind:
                return spec
        raise AssertionError(f"there is no CDI spec of {kind}")

    def start(
        self,
        *command: object,
        gpus: Sequence[int] | None = (0,),
        name: str = "",
        output: int | None = None,
        **changes: Any,
    ) -> Container:
        """``runc run --detach`` of a new bundle; ``output`` is a descriptor, else it goes to a file outside."""
        name = name or self._new_name()
        bundle = self.bundle(name, command or ("/job",), gpus, **changes)
        log = self.place / f"{name}.log"
        pid_file = bundle / "pid"
        with open(log, "w") as out:
            argv = [self.engines[self.name], "--root", self.place / "state", *self.options]
            argv += ["run", "--detach", "--bundle", bundle]
            process = subprocess.Popen(
                [*map(str, argv), "--pid-file", str(pid_file), name],
                stdin=subprocess.DEVNULL,
                stdout=out if output is None else output,
                stderr=out if output is None else output,
                env=self.environment(),
                cwd="/",
                preexec_fn=lambda: _join(self.node.pid),  # noqa: PLW1509 - it only makes system calls
            )
            self.node.add(process)
            process.wait(60)
        assert process.returncode == 0, log.read_text()
        return self._started(name, name, int(pid_file.read_text()), log)

    def enter(self, container: Container, argv: Sequence[object], rc: int | None) -> Answer:
        return self("exec", container.id, *argv, rc=rc)

    def start_job(self, *command: object, **options: Any) -> Container:
        words = " ".join(map(str, command))
        made = self.start("/bin/sh", "-c", f"exec {words} >>/out 2>&1 </dev/null", **options)
        made.log = self.place / made.name / "up" / "out"  # where the node has mounted it nobody else sees
        return made

    def same_bundle(self, one: Container, name: str, cgroup: str = "") -> Path:
        """Makes a bundle with the configuration and the root of another as it is now."""
        config = json.loads((self.place / one.name / "config.json").read_text())
        config["linux"]["cgroupsPath"] = cgroup or f"{self.parent}/{name}"
        bundle = self.place / name
        (bundle / "work").mkdir(parents=True)
        (bundle / "rootfs").mkdir()
        shutil.copytree(self.place / one.name / "up", bundle / "up", symlinks=True)
        (bundle / "config.json").write_text(json.dumps(config))
        layers = f"lowerdir={self.rootfs},upperdir={bundle}/up,workdir={bundle}/work"
        self.call("/bin/mount", "-t", "overlay", "overlay", "-o", layers, bundle / "rootfs")
        return bundle

    def known(self, name: str) -> Container:
        found = {one["id"]: one for one in self("list", "--format", "json").json or []}[name]
        return self._started(name, name, found["pid"], Path(found["bundle"]) / "up" / "out")

    def names(self) -> list[str]:
        return [one["id"] for one in self("list", "--format", "json").json or []]

    def exec_words(self, container: Container) -> list[str]:
        """What starts a program in a container, before its words."""
        return [self.engines[self.name], "--root", str(self.place / "state"), "exec", container.id]

    def remove(self, container: Container) -> None:
        self("delete", "--force", container.id)
        self.call("/bin/umount", "--lazy", self.place / container.name / "rootfs", rc=None)
        self.containers.remove(container)


class Crun(Runc):
    """crun with the same bundles, and without cgroups: it has no way with cgroups of both versions."""

    name = "crun"
    options = ("--cgroup-manager=disabled",)


class Containerd(Runtime):
    """containerd, with a daemon in the node, driven by its own ctr."""

    name = "containerd"

    def __init__(self, node: Node, engines: Engines, place: Path, *, config: str = "", cri: bool = False):
        super().__init__(node, engines, place)
        self.config = place / "config.toml"
        self.socket = self.sockets / "containerd"
        self.logs: list[Path] = []
        off = ["io.containerd.grpc.v1.cri", "io.containerd.cri.v1.images", "io.containerd.cri.v1.runtime"]
        off = [] if cri else [*off, "io.containerd.nri.v1.nri"]
        self.config.write_text(
            f"""\
version = 3
root = "{place}/root"
state = "{place}/state"
disabled_plugins = {json.dumps(off)}
[grpc]
address = "{self.socket}"
[ttrpc]
address = "{self.socket}.ttrpc"
{config}
"""
        )
        self.begin()

    def begin(self) -> None:
        """Starts its daemon, which finds the containers that are there."""
        self.daemon = self._serve(self.engines["containerd"], "--config", self.config)

    def __call__(self, *arguments: object, rc: int | None = 0, limit: float = 180) -> Answer:
        """``containerd("containers", "list")``: its ctr."""
        return self.call(self.engines["ctr"], "--address", self.socket, *arguments, rc=rc, limit=limit)

    def load(self, archive: Path, namespace: str = "default") -> None:
        """Puts an image into its store."""
        self("--namespace", namespace, "images", "import", archive)

    def environment(self) -> dict[str, str]:
        return {**super().environment(), "CONTAINERD_ADDRESS": str(self.socket)}

    def start(
        self,
        *command: object,
        gpus: Sequence[int] | None = None,
        options: Sequence[object] = (),
        cdi: Sequence[str] = (),
        env: Sequence[str] = (),
        name: str = "",
        image: str = NAME,
    ) -> Container:
        """``ctr run --detach``; ``options`` are more of ctr's, ``cdi`` devices of specs in the node's /etc/cdi."""
        name = name or self._new_name()
        log = self.place / f"{name}.log"
        words = [*([] if gpus is None else _gpu_options_of_ctr(gpus)), *_devices_and_env(cdi, env)]
        place = ["--cgroup", f"{self.parent}/{name}", "--log-uri", f"file://{log}"]
        place += ["--runc-binary", self.engines["runc"], "--cpu-shares", "0"]  # there may be no controller for that
        self("run", "--detach", *place, *words, *options, image, name, *(command or ("/job",)))
        self.logs.append(log)
        return self._started(name, name, self._tasks()[name], log)

    def _tasks(self) -> dict[str, int]:
        """Those that run → their pids."""
        tasks = [line.split() for line in self("tasks", "list").stdout.splitlines()[1:]]
        return {fields[0]: int(fields[1]) for fields in tasks if fields[2] == "RUNNING"}

    def start_job(self, *command: object, **options: Any) -> Container:
        return self.start(*command, **{"gpus": (0,), **options})

    def known(self, name: str) -> Container:
        # The task that it was has said which: its own, or that of the one that it is a clone of.
        log = next((one for one in self.logs if one.name == f"{name}.log"), self.logs[0])
        own = sorted(log.parent.glob(f"*.log*.{name}"))  # of one that has come back under another name
        return self._started(name, name, self._tasks()[name], own[0] if own else log)

    def names(self) -> list[str]:
        return self("containers", "list", "--quiet").stdout.split()

    def state(self, name: str) -> str:
        """What it says of a container's task: "running", say."""
        lines = [line.split() for line in self("tasks", "list").stdout.splitlines()[1:]]
        return next((fields[2].lower() for fields in lines if fields[0] == name), "")

    def snapshots(self) -> list[str]:
        """The root file systems of containers that it has, of those that are there or not."""
        lines = [line.split() for line in self("snapshots", "list").stdout.splitlines()[1:]]
        return [fields[0] for fields in lines if fields[-1] != "Committed"]

    def exec_words(self, container: Container) -> list[str]:
        """What starts a program in a container, before its words."""
        words = [self.engines["ctr"], "--address", str(self.socket), "tasks", "exec", "--exec-id", secrets.token_hex(4)]
        return [*words, container.id]

    def enter(self, container: Container, argv: Sequence[object], rc: int | None) -> Answer:
        return self("tasks", "exec", "--exec-id", secrets.token_hex(4), container.id, *argv, rc=rc)

    def remove(self, container: Container) -> None:
        self("tasks", "delete", "--force", container.id, rc=None)
        self("containers", "delete", container.id, rc=None)
        self.containers.remove(container)

    def close(self) -> None:
        for name in self.names():
            self("tasks", "delete", "--force", name, rc=None)
            self("containers", "delete", name, rc=None)
        self.containers.clear()
        self.daemon.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.daemon.wait(60)
        super().close()


class Docker(Runtime):
    """Docker: dockerd in the node, which starts a containerd of its own, driven by its own client."""

    name = "docker"

    def __init__(self, node: Node, engines: Engines, place: Path):
        super().__init__(node, engines, place)
        own_folders(node, "/var/lib", "/run")
        for folder, own in (("/var/lib/docker", "lib"), ("/run/docker", "run")):  # its own are no overlay's
            (place / own).mkdir()
            node.run(["mkdir", "-p", folder])
            node.run(["mount", "--bind", place / own, folder])
        self.socket = self.sockets / "docker"
        (place / "daemon.json").write_text("{}")
        off = ("--bridge=none", "--userland-proxy=false", "--iptables=false", "--ip6tables=false")
        self.daemon = self._serve(
            engines["dockerd"],
            *(f"--config-file={place}/daemon.json", f"--pidfile={place}/docker.pid", f"--host=unix://{self.socket}"),
            *(f"--cgroup-parent={self.parent}", "--exec-opt=native.cgroupdriver=cgroupfs", *off),
            "--storage-driver=overlay2",
        )

    def __call__(self, *arguments: object, rc: int | None = 0, limit: float = 180) -> Answer:
        """``docker("ps", "--all")``."""
        return self.call(self.engines["docker"], "--host", f"unix://{self.socket}", *arguments, rc=rc, limit=limit)

    def load(self, rootfs: Path) -> None:
        """Puts an image of that root folder into its store."""
        archive = self.place / "rootfs.tar"
        subprocess.run([self.engines["tar"], "-C", rootfs, "-cf", archive, "."], check=True)
        self("import", archive, NAME)

    def start(
        self,
        *command: object,
        gpus: Sequence[int] | None = (0,),
        options: Sequence[object] = (),
        cdi: Sequence[str] = (),
        env: Sequence[str] = (),
        name: str = "",
        image: str = NAME,
    ) -> Container:
        """``docker run --detach``; ``options`` are more of docker's, ``gpus`` None for none of the node's."""
        name = name or self._new_name()
        words = [*([] if gpus is None else _gpu_options(gpus)), *_devices_and_env(cdi, env)]
        place = ["--name", name, "--network", "none", "--cgroupns", "private"]
        self("run", "--detach", *place, *words, *options, image, *command)
        return self.known(name)

    def known(self, name: str) -> Container:
        (found,) = self("container", "inspect", name).json
        return self._started(found["Id"], name, found["State"]["Pid"], Path(found["LogPath"]))

    def words(self, log: Path) -> str:
        written = self.place / "lib" / log.relative_to("/var/lib/docker")
        return "".join(json.loads(line)["log"] for line in super().words(written).splitlines())

    def enter(self, container: Container, argv: Sequence[object], rc: int | None) -> Answer:
        return self("exec", container.id, *argv, rc=rc)

    def names(self) -> list[str]:
        return self("ps", "--all", "--format", "{{.Names}}").stdout.split()

    def close(self) -> None:
        for name in self.names():
            self("rm", "--force", name)
        self.containers.clear()
        self.daemon.terminate()
        self.daemon.wait(60)
        super().close()


class Pods(Containerd):
    """containerd with pods, as a kubelet asks it for them; their network is the machine's: there is no CNI."""

    PAUSE = "localhost/limosa-pause:1"

    def __init__(self, node: Node, engines: Engines, place: Path):
        cri = "plugins.'io.containerd.cri.v1"
        config = f"""\
[plugins.'io.containerd.nri.v1.nri']
disable = true
[{cri}.images'.pinned_images]
sandbox = "{self.PAUSE}"
[{cri}.runtime']
restrict_oom_score_adj = true
[{cri}.runtime'.cni]
conf_dir = "{place}/cni"
[{cri}.runtime'.containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[{cri}.runtime'.containerd.runtimes.runc.options]
BinaryName = "{engines["runc"]}"
SystemdCgroup = false
"""
        super().__init__(node, engines, place, config=config, cri=True)

    def cri(self, method: str, *fields: Any) -> Message:
        """What a kubelet asks: ``cri("Version")``."""
        asked = grpc.call(str(self.socket), f"runtime.v1.RuntimeService/{method}", message(*fields), {})
        return Message(next(asked, b""))

    def start_pod(
        self,
        name: str,
        *command: str,
        gpus: Sequence[int] = (0,),
        image: str = NAME,
        annotations: Mapping[str, str] | None = None,
    ) -> tuple[str, int]:
        """Starts a pod of one container, which has the annotations; returns that one's id and pid."""
        mode = message((1, _OF_NODE), (2, _OF_CONTAINER))
        about = message((1, name), (2, f"uid-{name}"), (3, "shop"))
        labels = {"io.kubernetes.pod.name": name, "io.kubernetes.pod.namespace": "shop"}
        pod = message(
            *((1, about), (3, str(self.place)), (6, labels)),
            (8, message((1, self.parent), (2, message((1, mode))))),
        )
        sandbox = self.cri("RunPodSandbox", (1, pod)).text(1)
        mounts = [message((1, to), (2, source), (3, int(source != NODE_FOLDER))) for source, to in gpu_mounts()]
        paths = [f"/dev/{one}" for one in (*_CONTROL, *(f"nvidia{gpu}" for gpu in gpus))]
        container = message(
            *((1, message((1, "server"))), (2, message((1, image)))),
            *((3, [word.encode() for word in command]), (7, mounts)),
            (8, [message((1, path), (2, path), (3, "rw")) for path in paths]),
            *((9, {**labels, "io.kubernetes.container.name": "server"}), (10, annotations or {}), (11, f"{name}.log")),
            (15, message((2, message((3, mode))))),
        )
        id_ = self.cri("CreateContainer", (1, sandbox), (2, container), (3, pod)).text(1)
        self.cri("StartContainer", (1, id_))
        tasks = [line.split() for line in self("--namespace", "k8s.io", "tasks", "list").stdout.splitlines()]
        return id_, next(int(fields[1]) for fields in tasks if fields[0] == id_)

    def close(self) -> None:
        for pod in self.cri("ListPodSandbox").all(1):
            for method in ("StopPodSandbox", "RemovePodSandbox"):
                self.cri(method, (1, Message(pod).text(1)))
        super().close()


def gpu_mounts() -> list[tuple[str, str]]:
    """What has to be bound into a container for software GPUs: from, to."""
    return [(NODE_FOLDER, NODE_FOLDER), *((str(SOFTGPU / one), f"{library_folder()}/{one}") for one in LIBRARIES)]


def _gpu_options_of_ctr(gpus: Sequence[int]) -> list[str]:
    words = []
    for name in (*_CONTROL, *(f"nvidia{gpu}" for gpu in gpus)):
        words += ["--device", f"/dev/{name}"]
    for source, target in gpu_mounts():
        options = "rbind:rw" if source == NODE_FOLDER else "rbind:ro"
        words += ["--mount", f"type=bind,src={source},dst={target},options={options}"]
    return words


def _devices_and_env(cdi: Sequence[str], env: Sequence[str]) -> list[str]:
    """What podman, docker and ctr take for CDI devices and variables."""
    return [f"--device={device}" for device in cdi] + [f"--env={one}" for one in env]


def _gpu_options(gpus: Sequence[int]) -> list[str]:
    words = []
    for name in (*_CONTROL, *(f"nvidia{gpu}" for gpu in gpus)):
        words += ["--device", f"/dev/{name}"]
    for source, target in gpu_mounts():
        words += ["--volume", f"{source}:{target}{'' if source == NODE_FOLDER else ':ro'}"]
    return words


def bundle_config(name: str, parent: str, command: list[str], gpus: Sequence[int] | None) -> dict[str, Any]:
    """A config.json as podman would write one, with a device filter that lets its GPUs and nothing else."""
    capabilities = ["CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_KILL", "CAP_SETGID", "CAP_SETUID"]
    usual = ["nosuid", "noexec", "nodev"]
    mounts = [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755", "size=65536k"]},
        {"destination": "/dev/shm", "type": "tmpfs", "source": "shm", "options": [*usual, "mode=1777", "size=65536k"]},
        {"destination": "/dev/mqueue", "type": "mqueue", "source": "mqueue", "options": usual},
        {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": [*usual, "ro"]},
    ]
    devices, rules = [], [{"allow": False, "access": "rwm"}]
    if gpus is not None:
        for source, target in gpu_mounts():
            options = ["rbind", "rw"] if source == NODE_FOLDER else ["rbind", "ro"]
            mounts.append({"destination": target, "type": "bind", "source": source, "options": options})
        for node, number in _numbers(gpus).items():
            major, minor = os.major(number), os.minor(number)
            devices.append({"path": node, "type": "c", "major": major, "minor": minor, "fileMode": 0o666})
            rules.append({"allow": True, "type": "c", "major": major, "minor": minor, "access": "rw"})
    return {
        "ociVersion": "1.0.2",
        "process": {
            "user": {"uid": 0, "gid": 0},
            "args": command,
            "env": ["PATH=/bin:/usr/bin"],
            "cwd": "/",
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), capabilities),
            "rlimits": [{"type": "RLIMIT_NOFILE", "hard": 1024, "soft": 1024}],
            "noNewPrivileges": True,
        },
        "root": {"path": "rootfs", "readonly": False},
        "hostname": name,
        "mounts": mounts,
        "linux": {
            "cgroupsPath": f"{parent}/{name}",
            "devices": devices,
            "resources": {"devices": rules},
            "namespaces": [{"type": kind} for kind in ("pid", "network", "ipc", "uts", "mount")],
            "maskedPaths": ["/proc/kcore", "/proc/keys"],
            "readonlyPaths": ["/proc/sys", "/proc/sysrq-trigger"],
        },
    }


def _numbers(gpus: Sequence[int]) -> dict[str, int]:
    """The software GPUs' device nodes and their numbers."""
    from limosa_softgpu.node import MAJOR

    zero = os.makedev(1, 5)
    return {**{f"/dev/{name}": zero for name in _CONTROL}, **{f"/dev/nvidia{g}": os.makedev(MAJOR, g) for g in gpus}}


def _join(pid: int) -> None:
    from limosa_softgpu.node import join

    if pid:  # else the caller is in the node already
        join(pid)


def own_folders(node: Node, *folders: str) -> None:
    """Gives the node's programs such folders of their own: what they change there is gone with the node."""
    for number, folder in enumerate(folders):
        place = f"/dev/own-{number}-{secrets.token_hex(2)}"
        node.run(["mkdir", "-p", f"{place}/up", f"{place}/work", folder])
        layers = f"lowerdir={folder},upperdir={place}/up,workdir={place}/work"
        node.run(["mount", "-t", "overlay", "overlay", "-o", layers, folder])


def apply_cdi(config: dict[str, Any], spec: dict[str, Any], name: str) -> None:
    """Does to a config.json what containerd and podman do with a device of a CDI spec."""
    edits = [spec.get("containerEdits", {}), *(d["containerEdits"] for d in spec["devices"] if d["name"] == name)]
    assert len(edits) == 2, f"there is no {name} in {spec}"
    for edit in edits:
        config["process"]["env"] += edit.get("env", [])
        for mount in edit.get("mounts", []):
            made = {"destination": mount["containerPath"], "source": mount["hostPath"], "type": "bind"}
            config["mounts"].append({**made, "options": mount.get("options", [])})
        for hook in edit.get("hooks", []):
            made = {"path": hook["path"], "args": hook["args"]}
            config.setdefault("hooks", {}).setdefault(hook["hookName"], []).append(made)
        for node in edit.get("deviceNodes", []):
            number = os.stat(node.get("hostPath", node["path"])).st_rdev if "major" not in node else None
            major = node["major"] if number is None else os.major(number)
            minor = node.get("minor", 0) if number is None else os.minor(number)
            device = {"path": node["path"], "type": "c", "major": major, "minor": minor, "fileMode": 0o666}
            config["linux"]["devices"].append(device)
            rule = {"allow": True, "type": "c", "major": major, "minor": minor, "access": "rw"}
            config["linux"]["resources"]["devices"].append(rule)


def cgroup_layouts() -> list[str]:
    """What a node here can show a runtime: "v1" and "v2", or "v2" alone."""
    with open("/proc/self/mounts") as file:
        kinds = {fields[2] for fields in map(str.split, file) if fields[1].startswith("/sys/fs/cgroup")}
    return ["v1", "v2"] if "cgroup" in kinds else ["v2"]


def lay_out_cgroups(node: Node, layout: str) -> None:
    """Let the node's programs see cgroups of one version alone, where the machine has both.

    Of v2 there is what the machine has not given to v1: the device filter always, memory and others seldom.
    """
    if cgroup_layouts() == ["v2"]:
        return
    if layout == "v2":
        node.run(["mount", "-t", "cgroup2", "cgroup2", "/sys/fs/cgroup"])
    else:
        node.run(["sh", "-c", "umount -l /sys/fs/cgroup/unified 2>/dev/null || true"])


def clear_cgroups(parent: str) -> None:
    """Ends what is left in the cgroups below one of that name, and takes them away in every hierarchy."""
    for hierarchy in _hierarchies():
        for folder in [Path(one) for top in _called(parent, hierarchy) for one, _, _ in os.walk(top, topdown=False)]:
            end = time.monotonic() + 60
            while time.monotonic() < end:
                with contextlib.suppress(FileNotFoundError):
                    for pid in (folder / "cgroup.procs").read_text().split():
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(int(pid), signal.SIGKILL)
                with contextlib.suppress(FileNotFoundError):
                    try:
                        folder.rmdir()
                    except OSError:
                        time.sleep(0.02)
                        continue
                break
            else:
                raise AssertionError(f"{folder} cannot be taken away")


@contextlib.contextmanager
def own_cgroups(name: str) -> Iterator[None]:
    """Has this process and its warm ones, and all that they start, in cgroups of its own in every hierarchy.

    Where a runtime makes none (of the version that the node does not show), CRIU notes the one that a container's
    processes have, with all that is below. At the top that is whatever others make and take away meanwhile, and a
    restore fails that meets such a one in its middle ("bad cgroup path").
    """
    before = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, kinds, path = line.split(":", 2)
        before["unified" if number == "0" else kinds] = path
    for hierarchy in _hierarchies():
        kind = os.path.basename(hierarchy)
        found = next((path for kinds, path in before.items() if kind in kinds.replace("name=", "").split(",")), None)
        if found is None:
            continue
        made = Path(f"{hierarchy}{found}") / name
        made.mkdir(exist_ok=True)
        for file in ("cpuset.cpus", "cpuset.mems"):
            if (made / file).exists() and not (made / file).read_text().strip():
                (made / file).write_text((made.parent / file).read_text())
        for pid in (os.getpid(), *warm.pids()):
            (made / "cgroup.procs").write_text(str(pid))
    yield
    for hierarchy in _hierarchies():
        for made in _called(name, hierarchy):
            for pid in (made / "cgroup.procs").read_text().split():
                with contextlib.suppress(OSError):
                    (made.parent / "cgroup.procs").write_text(pid)
            with contextlib.suppress(OSError):
                made.rmdir()


def _called(name: str, hierarchy: str) -> list[Path]:
    """The cgroups of a name, wherever they are; others come and go meanwhile."""
    return [Path(folder) for folder, _, _ in os.walk(hierarchy) if os.path.basename(folder) == name.lstrip("/")]


def _hierarchies() -> list[str]:
    with open("/proc/self/mounts") as file:
        mounts = [line.split() for line in file]
    return [fields[1] for fields in mounts if fields[2] in ("cgroup", "cgroup2")]
