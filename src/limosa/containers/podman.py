"""podman: its archive of a container is the host side, and it makes a container of one."""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import stat
from collections.abc import Callable, Mapping, Sequence

import msgspec

from limosa import start
from limosa.containers import calls
from limosa.containers.published import Published
from limosa.containers.runc_leftovers import take_away
from limosa.containers.runtime import (
    MACHINES,
    NAME,
    PRIVATE,
    SHARES,
    Contained,
    Kept,
    Runtime,
    Volume,
    alive,
    bound,
    check_name,
    criu_said,
    end,
    flags,
    living,
)
from limosa.containers.state import MADE_ID, folders
from limosa.errors import FailedUndone
from limosa.image import ContainerRecord
from limosa.process.criu.lent import was_lent
from limosa.process.criu.stats import DumpStats
from limosa.process.identity import Identity
from limosa.process.openat import closing
from limosa.process.slurp import head
from limosa.structs import ready

ARCHIVE = "container.tar"
"""What podman's archive of a container is called among an image's files."""

_NETWORKS = (MACHINES, "none")
_NEVER_RAN = ("created", "configured", "initialized")
_IN_USE = "already in use"  # a name, or an id
_HALF_REMOVED = ("container not known", "layer not known")  # a podman rm was killed: its storage has not all of it
_NO_ADDRESS = ("is already allocated", "not in any subnet")  # as netavark and podman say it
_HINT = "--name: under another name it gets another address"
_ANY_ADDRESS = ("", "0.0.0.0", "::", "[::]")  # noqa: S104 - what podman notes
_SHARED = ("container:", "ns:")
_MOST_ARGUMENTS = 1 << 16
_MOST_HOSTS = 1 << 20
_ROOT_CHANGES = "rootfs-diff.tar"  # podman puts together what goes into its archive


class _State(msgspec.Struct, rename="pascal"):
    status: str = ""
    pid: int = 0
    conmon_pid: int = 0
    started_at: str = ""
    restored: bool = False
    restored_at: str = ""


class _Log(msgspec.Struct, rename="pascal"):
    path: str = ""


class _Binding(msgspec.Struct, rename="pascal"):
    host_port: str = ""
    host_address: str = msgspec.field(default="", name="HostIp")


class _Host(msgspec.Struct, rename={"uts": "UTSMode"}):
    network: str = msgspec.field(default="", name="NetworkMode")
    pid: str = msgspec.field(default="", name="PidMode")
    ipc: str = msgspec.field(default="", name="IpcMode")
    uts: str = msgspec.field(default="", name="UTSMode")
    user: str = msgspec.field(default="", name="UsernsMode")
    ports: dict[str, list[_Binding] | None] | None = msgspec.field(default=None, name="PortBindings")
    log: _Log = msgspec.field(default_factory=_Log, name="LogConfig")


class _Mount(msgspec.Struct, rename="pascal"):
    type: str = ""
    name: str = ""
    source: str = ""
    destination: str = ""
    may_write: bool = msgspec.field(default=False, name="RW")

    def writes(self) -> list[str]:
        """What of the machine it lets a container change, in words."""
        if not self.may_write:
            return []
        return [f"volume {self.name}"] if self.type == "volume" and self.name else bound(self.source)


class _Made(msgspec.Struct, rename="pascal"):
    name: str
    created_at: datetime.datetime


class _Secret(msgspec.Struct, rename="pascal"):
    name: str = ""


class _Config(msgspec.Struct, rename="pascal"):
    secrets: list[_Secret] | None = None


class _Inspected(msgspec.Struct, rename="pascal"):
    id: str
    name: str
    image: str = ""
    image_name: str = ""
    pod: str = ""
    state: _State = msgspec.field(default_factory=_State)
    host_config: _Host = msgspec.field(default_factory=_Host)
    config: _Config = msgspec.field(default_factory=_Config)
    mounts: list[_Mount] = []
    static_dir: str = ""
    hosts_path: str = ""


class Podman(Runtime):
    """podman, with the OCI runtime below it that a container was made with."""

    name = "podman"

    def __init__(self, program: str, configured: Mapping[str, str], notes: Sequence[str]):
        super().__init__(program, configured, notes)
        self._makes: set[str] = set()  # ids that were nobody's right before
        self._anothers: set[str] = set()  # volumes that somebody else has made meanwhile

    def find(self, word: str) -> Contained | None:
        said = self._run("container", "inspect", "--", word)
        if said.rc:
            if not self._exists("container", word):
                return None
            state = self._state(word)
            lives = state is not None and alive(Identity(state.pid, state.start_time))
            if any(words in said.why for words in _HALF_REMOVED) and not lives:
                return Contained(id=word, name=word, init=None, ran=False, removed=True)
            raise FailedUndone(what="podman container inspect", detail=said.why)
        try:
            (one,) = msgspec.json.decode(said.out, type=ready(list[_Inspected]))
        except (msgspec.DecodeError, ValueError) as error:
            raise FailedUndone(what="podman container inspect", detail=f"it cannot be understood: {error}") from error
        if word not in (one.id, one.name):
            return None  # a part of an id
        host = one.host_config
        shared = [
            f"it shares its {kind} namespace with {mode.partition(':')[2][:12] or mode}"
            for kind, mode in (("network", host.network), ("pid", host.pid), ("ipc", host.ipc), ("uts", host.uts))
            if mode.startswith(_SHARED)
        ]
        shared += [f"it is in pod {one.pod[:12]}"] if one.pod else []
        shared += [
            f"it has the host's {k} namespace" for k, m in (("pid", host.pid), ("ipc", host.ipc)) if m == MACHINES
        ]
        secrets = one.config.secrets or []
        ports, published = _published(host)
        return Contained(
            id=one.id,
            name=one.name,
            init=living(one.state.pid),
            image=one.image_name,
            image_id=one.image,
            bundle=one.static_dir,
            network=host.network if host.network in _NETWORKS else PRIVATE,
            monitor=one.state.conmon_pid,
            run=one.state.started_at,
            ran=one.state.status not in _NEVER_RAN,
            paused=one.state.status == "paused",
            ending=one.state.status == "stopping",
            ports=ports,
            published=published,
            volumes=tuple(Volume(m.name, m.destination) for m in one.mounts if m.type == "volume" and m.name),
            writes=tuple(word for m in one.mounts for word in m.writes()),
            log=host.log.path,
            hosts=one.hosts_path,
            restored=one.state.restored_at if one.state.restored else "",
            against=(
                *((SHARES, text) for text in shared),
                # Its copy of them goes with the container, and the one that it restores looks for that (podman 4.3).
                *(("container-secrets", f"podman would not bring its secret {s.name} back") for s in secrets[:1]),
                *self._against_oci(one.state.conmon_pid),
            ),
        )

    def _against_oci(self, monitor: int) -> list[tuple[str, str]]:
        """What keeps the OCI runtime that a container's monitor has started it with from using CRIU."""
        try:
            words = head(f"/proc/{monitor}/cmdline", _MOST_ARGUMENTS).split(b"\0") if monitor > 0 else []
        except OSError:
            words = []
        program = os.fsdecode(words[words.index(b"-r") + 1]) if b"-r" in words[:-1] else ""
        if os.path.basename(program) != "crun" or not start.trusted(program):
            return []
        if b"+CRIU" in calls.call([program, "--version"]).out:
            return []
        return [("container-runtime", f"{program}, which podman started it with, was built without CRIU")]

    def write(self, contained: Contained, kept: Kept) -> DumpStats:
        options = ["--leave-running", "--compress=none", f"--export=/proc/self/fd/{kept.images_fd}/{ARCHIVE}"]
        try:
            said = self._run(
                "container", "checkpoint", *options, *flags(kept), *_print_stats(kept), "--", contained.id,
                criu_folder=kept.criu_folder, pass_fds=[kept.images_fd], on_start=kept.on_start, tick=kept.tick,
                ends_early=True,  # a file with a hole of terabytes goes into the archive with all of its zeros
            )  # fmt: skip
        except BaseException:
            _remove(contained.bundle, _ROOT_CHANGES)
            raise
        if said.rc:
            _remove(contained.bundle, _ROOT_CHANGES)
            why = criu_said(os.path.join(contained.bundle, "dump.log")) or said.why
            raise FailedUndone(what="podman container checkpoint", detail=why)
        return _stats_of_podman(said.out)

    def against_return(self, record: ContainerRecord, name: str, bundle: str) -> list[tuple[str, str, str]]:
        found = []
        if bundle:
            found.append(
                ("container-bundle", "podman makes the bundles of its containers itself", "leave out --bundle")
            )
        found += self.taken_since(record, name, bundle)
        if not self._image(record):
            text = f"podman does not have the image {record.image} ({record.image_id[:12]}) that it was made of"
            found.append(("container-image", text, "podman pull, or podman load"))
        there = self._volumes(record)
        if there and len(there) < len(record.volumes):
            text = f"the volume {there[0]} is there already, and others of the container are not"
            found.append(("container-volumes", text, f"podman volume rm {there[0]}, or make the others"))
        return found

    def _image(self, record: ContainerRecord) -> bool:
        words = [word for word in (record.image_id, record.image) if word and not word.startswith("-")]
        return any(self._exists("image", word) for word in words)

    def _exists(self, kind: str, word: str) -> bool:
        """Whether podman has a "container", an "image" or a "volume" of that name.

        Raises:
            FailedUndone: it does not say: somebody has killed it, perhaps.
        """
        said = self._run(kind, "exists", "--", word)
        if said.rc not in (0, 1):
            raise FailedUndone(what=f"podman {kind} exists", detail=said.why)
        return said.rc == 0

    def _volumes(self, record: ContainerRecord) -> list[str]:
        """Those of a container's volumes that are there."""
        return [v for v in record.volumes if NAME.fullmatch(v) and self._exists("volume", v)]

    def taken_since(self, record: ContainerRecord, name: str, bundle: str) -> list[tuple[str, str, str]]:
        del bundle
        for word in (name, record.id) if _keeps_id(record, name) else (name,):
            if self._exists("container", word):
                hint = f"another name with --name, or podman rm {word}"
                return [("container-name", f"podman has a container {word} already", hint)]
        return []

    def alone(self, record: ContainerRecord, name: str, bundle: str) -> tuple[list[str], list[str]]:
        made, used = super().alone(record, name, bundle)
        if _keeps_id(record, name):
            made.append(f"container {self.name}:{record.id}")
        there = self._volumes(record)
        made += [f"volume {v}" for v in record.volumes if v not in there]
        return made, [*used, *(f"volume {v}" for v in there)]

    def bring_back(self, record: ContainerRecord, name: str, bundle: str, kept: Kept) -> Contained:
        options = [f"--import=/proc/self/fd/{kept.images_fd}/{ARCHIVE}"]
        if name == record.id:
            if since := self.taken_since(record, record.name, bundle):
                raise FailedUndone(what="podman container restore", detail=since[0][1], hint=since[0][2])
            self._makes.add(record.id)
        else:
            options += [f"--name={check_name(name)}"]
            if not kept.own_name:  # those are the other one's
                options += ["--ignore-static-ip", "--ignore-static-mac"]
            # Which podman would refuse together with a name. CRIU is told without it.
            kept = msgspec.structs.replace(kept, tcp_established=False)
        options += [f"--publish={one}" for one in kept.publish]
        if self._volumes(record):
            options.append("--ignore-volumes")
        said = self._run(
            "container", "restore", *options, *flags(kept), *_print_stats(kept),
            criu_folder=kept.criu_folder, pass_fds=[kept.images_fd], on_start=kept.on_start, tick=kept.tick,
        )  # fmt: skip
        found = self.find(name)
        if found is None and not said.rc:  # its archive calls itself otherwise than the image says
            self._remove_what_was_made(said.out)
        if _IN_USE in said.why:
            self._makes.discard(record.id)
        self._anothers.update(name for name in record.volumes if f"volume with name {name} already exists" in said.why)
        if said.rc or found is None or found.init is None:
            why = (criu_said(os.path.join(found.bundle, "restore.log")) if found is not None else "") or said.why
            hint = _HINT if any(words in why for words in _NO_ADDRESS) else ""
            raise FailedUndone(what="podman container restore", detail=why, hint=hint)
        return msgspec.structs.replace(found, stats=_restore_stats_of_podman(said.out) if kept.stats else {})

    def made_as(self, name: str, operation: str, record: ContainerRecord) -> str:
        if _keeps_id(record, name):
            return record.id
        return f"{name[:60]}-{operation}"  # nobody else's: so what is left of a failure is known

    def rename(self, contained: Contained, name: str) -> None:
        if contained.name == name:
            return
        said = self._run("rename", "--", contained.id, name)
        if said.rc:
            raise FailedUndone(what=f"naming the container {name}", detail=said.why)
        with contextlib.suppress(OSError):
            _rename_in_hosts(contained.hosts, contained.name, name)

    def remove_made(self, word: str, bundle: str, operation: str) -> None:
        found = self.find(word)
        if found is not None and (not operation or not MADE_ID.fullmatch(word) or self._has_made(found, operation)):
            self.remove(found.id)
        id_ = word if found is None else found.id
        if MADE_ID.fullmatch(id_) and self.find(id_) is None:
            for folder in folders(self.notes):  # of a runc below it that was killed
                if os.path.basename(folder) == "runc":
                    take_away(folder, id_)

    def to_make(self, record: ContainerRecord) -> list[str]:
        there = self._volumes(record)
        return [v for v in record.volumes if v not in there]

    def remove_volumes(self, names: Sequence[str], since: float, until: float) -> None:
        for name in filter(NAME.fullmatch, set(names) - self._anothers):
            if self._exists("volume", name) and since <= self._made_at(name) <= until:
                said = self._run("volume", "rm", "--", name)
                taken = "being used" in said.why  # by somebody else's container by now
                if said.rc and not taken and self._exists("volume", name):
                    raise FailedUndone(what="podman volume rm", detail=said.why)

    def _made_at(self, volume: str) -> float:
        """When a volume was made, in seconds since the epoch; -1 where podman says nothing of just that one."""
        said = self._run("volume", "inspect", "--", volume)
        with contextlib.suppress(msgspec.DecodeError, ValueError):
            (one,) = msgspec.json.decode(said.out, type=ready(list[_Made]))
            if one.name == volume:
                return one.created_at.timestamp()
        return -1.0

    def _has_made(self, found: Contained, operation: str) -> bool:
        """Whether an operation has made a container whose id it has not chosen: others may have made one since.

        Its monitor keeps the PATH with the CRIU that was lent to that operation.
        """
        if found.id in self._makes or not found.ran:
            return True
        return found.monitor > 0 and was_lent(found.monitor, operation)

    def _remove_what_was_made(self, said: bytes) -> None:
        for word in said.decode(errors="replace").split():
            if MADE_ID.fullmatch(word.strip('",')):
                self.remove(word.strip('",'))

    def remove(self, id_: str, on_start: Callable[[Identity], None] = calls.nobody) -> None:
        state = self._state(id_)
        said = self._run("rm", "--force", "--time=0", "--", id_, on_start=on_start)
        if said.rc and self._exists("container", id_):
            raise FailedUndone(what="podman rm", detail=said.why)
        if state is not None:  # podman forgets it, too, where the runtime below was killed
            init = Identity(state.pid, state.start_time)
            end(init, state.cgroups if state.by == "runc" else ())
            if state.by == "runc":
                take_away(state.folder, state.id, ended=init)


def _keeps_id(record: ContainerRecord, name: str) -> bool:
    """Whether a container is to have the address that it had: podman brings it back with its id and its name alone."""
    return name == record.name and record.network == PRIVATE and MADE_ID.fullmatch(record.id) is not None


def _rename_in_hosts(path: str, before: str, name: str) -> None:
    """Write a container's new name into its /etc/hosts: podman leaves the one there that it was made under.

    The file is bound into the container, so it stays the same one. It is the container's to change: nothing else of
    it is touched, and no link is followed.
    """
    if not path or not start.trusted(path):
        return
    with closing(os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)) as fd:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return
        was = os.pread(fd, _MOST_HOSTS + 1, 0)
        now = re.sub(rb"(?<=\s)" + re.escape(before.encode()) + rb"(?=\s)", name.encode(), was)
        if len(was) <= _MOST_HOSTS and now != was:
            os.pwrite(fd, now, 0)
            os.ftruncate(fd, len(now))


def _published(host: _Host) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Ports of the machine that lead to a container: TCP ports of all addresses, and the words of others."""
    ports, others = [], []
    for inside, bindings in (host.ports or {}).items():
        for one in bindings or []:
            address = "" if one.host_address in _ANY_ADDRESS else one.host_address.strip("[]")
            address = f"[{address}]:" if ":" in address else f"{address}:" if address else ""
            found = Published.of(f"{address}{one.host_port}/{inside.rpartition('/')[2]}")
            if found is not None and found.protocol == "tcp" and not found.address:
                ports.append(found.port)
            elif found is not None:
                others.append(str(found))
    return tuple(ports), tuple(others)


def _print_stats(kept: Kept) -> list[str]:
    return ["--print-stats"] if kept.stats else []


class _CriuStats(msgspec.Struct):
    """CRIU's statistics as podman prints them: times in microseconds."""

    freezing_time: int = 0
    frozen_time: int = 0
    memdump_time: int = 0
    memwrite_time: int = 0
    pages_written: int = 0
    forking_time: int = 0
    restore_time: int = 0
    pages_restored: int = 0


class _OfOne(msgspec.Struct):
    criu_statistics: _CriuStats = msgspec.field(default_factory=_CriuStats)


class _Printed(msgspec.Struct):
    container_statistics: list[_OfOne] = []


def _printed(said: bytes) -> _CriuStats:
    """Statistics fail nothing: none where it is something else that podman has said."""
    with contextlib.suppress(msgspec.DecodeError):
        for one in msgspec.json.decode(said, type=ready(_Printed)).container_statistics:
            return one.criu_statistics
    return _CriuStats()


def _stats_of_podman(said: bytes) -> DumpStats:
    found = _printed(said)
    return DumpStats(
        freezing_time=found.freezing_time / 1e6,
        frozen_time=found.frozen_time / 1e6,
        memdump_time=found.memdump_time / 1e6,
        memwrite_time=found.memwrite_time / 1e6,
        pages=found.pages_written,
        bytes=found.pages_written * os.sysconf("SC_PAGE_SIZE"),
    )


def _restore_stats_of_podman(said: bytes) -> dict[str, float]:
    found = _printed(said)
    times = {"forking_time": found.forking_time / 1e6, "restore_time": found.restore_time / 1e6}
    return {**times, "pages_restored": found.pages_restored}


def _remove(folder: str, name: str) -> None:
    """Remove what a runtime that was ended has left in a folder of its own."""
    if os.path.isabs(folder) and start.trusted(folder):
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(folder, name))
