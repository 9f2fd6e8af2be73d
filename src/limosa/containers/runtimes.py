"""Container runtimes that write a container to disk and bring it back: what each says, and how it is told.

podman and runc. Names and ids are checked before they are told to a program: an id is what the runtime's own notes
say, and no name begins with a dash. What a runtime says of a container is compared with what the kernel says: which
first process it has, in which cgroup.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from limosa import start
from limosa.containers import calls
from limosa.containers.calls import Said
from limosa.containers.find import Container
from limosa.containers.state import State, folders, noted_in, read, states
from limosa.errors import CannotBeMoved, FailedUndone, InvalidArgument, LimosaError
from limosa.image import ContainerRecord
from limosa.process.criu.log import Cause, cause
from limosa.process.criu.stats import DumpStats, dump_stats, restore_stats
from limosa.process.identity import Identity
from limosa.process.slurp import head
from limosa.structs import ready

ARCHIVE = "container.tar"
"""What podman's archive of a container is called among an image's files."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}", re.ASCII)
MACHINES = "host"
"""What the network, and any other namespace, of a container is called that has the machine's."""

_NETWORKS = (MACHINES, "none")
_SHARES = "container-shares"
_SHARED = ("container:", "ns:")
_MOST_ARGUMENTS = 1 << 16
_ROOT_CHANGES = "rootfs-diff.tar"  # podman puts together what goes into its archive


class Volume(msgspec.Struct, frozen=True):
    """A named volume of a container."""

    name: str
    path: str


class Contained(msgspec.Struct, frozen=True, kw_only=True):
    """What a runtime says of one of its containers."""

    id: str
    name: str
    init: Identity | None  # its first process, if it runs
    image: str = ""  # the name of the image that it was made of
    image_id: str = ""
    bundle: str = ""
    network: str = ""  # "host", "none", "private"
    volumes: tuple[Volume, ...] = ()
    log: str = ""  # the file that its output goes to
    restored: str = ""  # when it was brought back from an image, where the runtime says that
    stats: Mapping[str, float] = {}  # what CRIU says of the restore that has made it, where that was asked for
    # what keeps the runtime from writing it to disk: id of the refusal and text of each
    against: tuple[tuple[str, str], ...] = ()


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """How the host side of a container is to be written, or brought back.

    Attributes:
        criu_folder: the folder with the CRIU that the runtime is to use.
        images_fd: the image's folder ``criu/``.
        work_fd: the folder for logs.
        tcp_established, file_locks, ext_unix_sk: as CRIU has them.
        stats: whether CRIU's statistics are wanted.
        output: a descriptor of where the output of a container goes that has no place of its runtime's for that.
        on_start: told who the runtime's program is, before it begins.
        tick: called while it works; raises to have it stopped.
    """

    criu_folder: str
    images_fd: int
    work_fd: int
    tcp_established: bool = False
    file_locks: bool = False
    ext_unix_sk: bool = False
    stats: bool = False
    output: int = subprocess.DEVNULL
    on_start: Callable[[Identity], None] = calls.nobody
    tick: Callable[[], None] = lambda: None


def check_name(name: str) -> str:
    """Return a name for a container that may be told to a runtime.

    Raises:
        InvalidArgument: it may not.
    """
    if not _NAME.fullmatch(name):
        raise InvalidArgument(
            detail=f"{name!r} is no name for a container: letters, digits, '_', '.' and '-', and no dash to begin with"
        )
    return name


class Runtime(ABC):
    """One runtime's program.

    Args:
        program: its absolute path.
        configured: by which variables (:func:`limosa.containers.calls.settings`).
        notes: folders in which it notes its containers, besides the usual ones.
    """

    name: ClassVar[str]

    def __init__(self, program: str, configured: Mapping[str, str], notes: Sequence[str]):
        self.program, self.configured, self.notes = program, dict(configured), list(notes)

    @abstractmethod
    def find(self, word: str) -> Contained | None:
        """Return what it says of the container of an id or a name; None where it has none."""

    @abstractmethod
    def write(self, contained: Contained, kept: Kept) -> DumpStats:
        """Write a container to disk, and let it run on: frozen, it stays so. Return CRIU's statistics, if asked for.

        Raises:
            FailedUndone: it failed, and the container is as it was.
        """

    @abstractmethod
    def against_return(self, record: ContainerRecord, name: str, bundle: str) -> list[tuple[str, str, str]]:
        """Return what stands against bringing a container back under a name: (id, text, hint) of each."""

    @abstractmethod
    def bring_back(self, record: ContainerRecord, name: str, bundle: str, kept: Kept) -> Contained:
        """Make a container of the image's files.

        Raises:
            FailedUndone: it failed; nothing of it is left, as far as the runtime clears up after itself.
        """

    @abstractmethod
    def remove(self, id_: str, on_start: Callable[[Identity], None] = calls.nobody) -> None:
        """End a container and take it away.

        Raises:
            FailedUndone: it is still there.
        """

    @abstractmethod
    def made_as(self, name: str, operation: str) -> str:
        """Return the name under which an operation makes a container that is to be called so."""

    @abstractmethod
    def rename(self, contained: Contained, name: str) -> None:
        """Give a container that an operation has made the name that it is to have.

        Raises:
            FailedUndone: another has that name by now.
        """

    @abstractmethod
    def remove_made(self, word: str, bundle: str) -> None:
        """Take a container away that an operation has begun to make, if it is there.

        Args:
            word: its id, or what :meth:`made_as` has said.
            bundle: its bundle.

        Raises:
            FailedUndone: it is still there.
        """

    def _run(self, *arguments: str, **options: Any) -> Said:
        return calls.call([self.program, *arguments], self.configured, **options)

    def _state(self, id_: str) -> State | None:
        return next((s for s in states(self.notes) if s.id == id_), None)


# --- podman ---------------------------------------------------------------------------------------------------


class _State(msgspec.Struct, rename="pascal"):
    status: str = ""
    pid: int = 0
    conmon_pid: int = 0
    restored: bool = False
    restored_at: str = ""


class _Log(msgspec.Struct, rename="pascal"):
    path: str = ""


class _Host(msgspec.Struct, rename={"uts": "UTSMode"}):
    network: str = msgspec.field(default="", name="NetworkMode")
    pid: str = msgspec.field(default="", name="PidMode")
    ipc: str = msgspec.field(default="", name="IpcMode")
    uts: str = msgspec.field(default="", name="UTSMode")
    user: str = msgspec.field(default="", name="UsernsMode")
    log: _Log = msgspec.field(default_factory=_Log, name="LogConfig")


class _Mount(msgspec.Struct, rename="pascal"):
    type: str = ""
    name: str = ""
    destination: str = ""


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


class _Podman(Runtime):
    """podman, with the OCI runtime below it that a container was made with."""

    name = "podman"

    def find(self, word: str) -> Contained | None:
        said = self._run("container", "inspect", "--", word)
        if said.rc:
            return None
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
        return Contained(
            id=one.id,
            name=one.name,
            init=_living(one.state.pid),
            image=one.image_name,
            image_id=one.image,
            bundle=one.static_dir,
            network=host.network if host.network in _NETWORKS else "private",
            volumes=tuple(Volume(m.name, m.destination) for m in one.mounts if m.type == "volume" and m.name),
            log=host.log.path,
            restored=one.state.restored_at if one.state.restored else "",
            against=(
                *((_SHARES, text) for text in shared),
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
                "container", "checkpoint", *options, *_flags(kept), *_print_stats(kept), "--", contained.id,
                criu_folder=kept.criu_folder, pass_fds=[kept.images_fd], on_start=kept.on_start, tick=kept.tick,
                ends_early=True,  # a file with a hole of terabytes goes into the archive with all of its zeros
            )  # fmt: skip
        except BaseException:
            _remove(contained.bundle, _ROOT_CHANGES)
            raise
        if said.rc:
            _remove(contained.bundle, _ROOT_CHANGES)
            why = _criu_said(os.path.join(contained.bundle, "dump.log")) or said.why
            raise FailedUndone(what="podman container checkpoint", detail=why)
        return _stats_of_podman(said.out)

    def against_return(self, record: ContainerRecord, name: str, bundle: str) -> list[tuple[str, str, str]]:
        found = []
        if bundle:
            found.append(
                ("container-bundle", "podman makes the bundles of its containers itself", "leave out --bundle")
            )
        if self._run("container", "exists", "--", name).rc == 0:
            hint = f"another name with --name, or podman rm {name}"
            found.append(("container-name", f"podman has a container {name} already", hint))
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
        return any(self._run("image", "exists", "--", word).rc == 0 for word in words)

    def _volumes(self, record: ContainerRecord) -> list[str]:
        """Those of a container's volumes that are there."""
        return [v for v in record.volumes if _NAME.fullmatch(v) and not self._run("volume", "exists", "--", v).rc]

    def bring_back(self, record: ContainerRecord, name: str, bundle: str, kept: Kept) -> Contained:
        options = [f"--import=/proc/self/fd/{kept.images_fd}/{ARCHIVE}", f"--name={check_name(name)}"]
        if name != record.name:  # those are the other one's
            options += ["--ignore-static-ip", "--ignore-static-mac"]
        if self._volumes(record):
            options.append("--ignore-volumes")
        said = self._run(
            "container", "restore", *options, *_flags(kept), *_print_stats(kept),
            criu_folder=kept.criu_folder, pass_fds=[kept.images_fd], on_start=kept.on_start, tick=kept.tick,
        )  # fmt: skip
        found = self.find(name)
        if said.rc or found is None or found.init is None:
            why = (_criu_said(os.path.join(found.bundle, "restore.log")) if found is not None else "") or said.why
            raise FailedUndone(what="podman container restore", detail=why)
        return msgspec.structs.replace(found, stats=_restore_stats_of_podman(said.out) if kept.stats else {})

    def made_as(self, name: str, operation: str) -> str:
        return f"{name[:60]}-{operation}"  # nobody else's: so what is left of a failure is known

    def rename(self, contained: Contained, name: str) -> None:
        said = self._run("rename", "--", contained.id, name)
        if said.rc:
            raise FailedUndone(what=f"naming the container {name}", detail=said.why)

    def remove_made(self, word: str, bundle: str) -> None:
        found = self.find(word)
        if found is not None:
            self.remove(found.id)

    def remove(self, id_: str, on_start: Callable[[Identity], None] = calls.nobody) -> None:
        said = self._run("rm", "--force", "--time=0", "--", id_, on_start=on_start)
        if said.rc and self._run("container", "exists", "--", id_).rc == 0:
            raise FailedUndone(what="podman rm", detail=said.why)


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


# --- runc -----------------------------------------------------------------------------------------------------


class _Namespace(msgspec.Struct):
    type: str
    path: str = ""


class _Linux(msgspec.Struct):
    namespaces: list[_Namespace] = []


class _Spec(msgspec.Struct):
    linux: _Linux = msgspec.field(default_factory=_Linux)


class _Runc(Runtime):
    """runc alone: its containers have bundles that somebody else makes and keeps."""

    name = "runc"

    def find(self, word: str) -> Contained | None:
        state = self._state(word)
        if state is None:
            return None
        spec = read(state.bundle, "config.json", _Spec)
        namespaces = {n.type: n.path for n in spec.linux.namespaces} if spec is not None else {}
        joined = [kind for kind, path in namespaces.items() if path and kind != "network"]
        against = [(_SHARES, f"its {kind} namespace is another's") for kind in joined]
        if spec is None:
            text = f"its bundle {state.bundle} cannot be read, or others can change it"
            against.append(("container-bundle", text))
        elif "pid" not in namespaces or "mount" not in namespaces:
            against.append((_SHARES, "it has the host's pid or mount namespace"))
        return Contained(
            id=state.id,
            name=state.id,
            init=_alive(Identity(state.pid, state.start_time)),
            bundle=state.bundle,
            network="private" if "network" in namespaces else "host",
            against=tuple(against),
        )

    def write(self, contained: Contained, kept: Kept) -> DumpStats:
        state = self._state(contained.id)
        if state is None:
            raise CannotBeMoved(detail=f"container {contained.id} has ended")
        folders_ = ["--image-path", f"/proc/self/fd/{kept.images_fd}", "--work-path", f"/proc/self/fd/{kept.work_fd}"]
        said = self._run(
            "--root", state.folder, "checkpoint", "--leave-running", *folders_,
            *_flags(kept), *_sockets(kept), "--", contained.id,
            criu_folder=kept.criu_folder, pass_fds=[kept.images_fd, kept.work_fd],
            on_start=kept.on_start, tick=kept.tick,
        )  # fmt: skip
        if said.rc:
            raise FailedUndone(what="runc checkpoint", detail=_criu_said_in(kept.work_fd, "dump.log") or said.why)
        return dump_stats(kept.work_fd) if kept.stats else DumpStats()

    def against_return(self, record: ContainerRecord, name: str, bundle: str) -> list[tuple[str, str, str]]:
        found = []
        if self.find(name) is not None:
            found.append(("container-name", f"runc has a container {name} already", "another name with --name"))
        place = bundle or record.bundle
        if not bundle and any(s.bundle == place for s in states(self.notes)):
            text = f"another container lives in the bundle {place}"
            found.append(("container-bundle", text, "--bundle names a bundle of its own for this one"))
        elif read(place, "config.json", _Spec) is None:
            text = f"there is no bundle {place} whose config.json only root can change"
            found.append(("container-bundle", text, "--bundle names one with the same root file system"))
        return found

    def bring_back(self, record: ContainerRecord, name: str, bundle: str, kept: Kept) -> Contained:
        known_ = folders(self.notes)
        folder = record.folder if record.folder in known_ else known_[0]
        folders_ = ["--image-path", f"/proc/self/fd/{kept.images_fd}", "--work-path", f"/proc/self/fd/{kept.work_fd}"]
        log = os.memfd_create("limosa-runc", os.MFD_CLOEXEC)
        try:
            said = self._run(
                "--root", folder, "--log", f"/proc/self/fd/{log}", "restore", "--detach", *folders_,
                *_flags(kept), *_sockets(kept), "--bundle", bundle or record.bundle, "--", check_name(name),
                criu_folder=kept.criu_folder, pass_fds=[kept.images_fd, kept.work_fd, log],
                speaks=False, output=kept.output,
                on_start=kept.on_start, tick=kept.tick,
            )  # fmt: skip
            words = os.pread(log, 1 << 16, 0).decode(errors="replace")
        finally:
            os.close(log)
        found = self.find(name)
        if said.rc or found is None or found.init is None:
            why = _criu_said_in(kept.work_fd, "restore.log") or Said(said.rc, b"", words).why
            raise FailedUndone(what="runc restore", detail=why)
        return msgspec.structs.replace(found, stats=restore_stats(kept.work_fd) if kept.stats else {})

    def made_as(self, name: str, operation: str) -> str:
        return name

    def rename(self, contained: Contained, name: str) -> None:
        """It has it."""

    def remove_made(self, word: str, bundle: str) -> None:
        found = self.find(word)
        if found is not None and found.bundle == bundle:
            self.remove(found.id)

    def remove(self, id_: str, on_start: Callable[[Identity], None] = calls.nobody) -> None:
        state = self._state(id_)
        if state is None:
            return
        said = self._run("--root", state.folder, "delete", "--force", "--", id_, on_start=on_start)
        if said.rc and self._state(id_) is not None:
            raise FailedUndone(what="runc delete", detail=said.why)


def folder_of(contained: Contained) -> str:
    """Return the folder in which runc keeps the state of a container, "" where it is not runc's."""
    return next((s.folder for s in states() if s.id == contained.id), "")


# --- both -----------------------------------------------------------------------------------------------------


_KINDS: Mapping[str, type[Runtime]] = {kind.name: kind for kind in (_Podman, _Runc)}


def runtime_of(
    name: str, program: str | None = None, configured: Mapping[str, str] | None = None, notes: Sequence[str] = ()
) -> Runtime:
    """Return the runtime of a name.

    Args:
        name: of it.
        program: where it is; None: where it is found.
        configured: by which variables; None: the caller's.
        notes: folders in which it notes its containers, besides the usual ones.

    Raises:
        CannotBeMoved: it is none that writes containers to disk, or its program is not here.
    """
    kind = _KINDS.get(name)
    if kind is None:
        raise CannotBeMoved(
            detail=f"containers of {name} cannot be written to disk", hint=f"those of {' and '.join(_KINDS)} can"
        )
    program = program or start.program(name)
    if program is None:
        raise CannotBeMoved(detail=f"there is no program {name} on the PATH that only root can change")
    return kind(program, calls.settings() if configured is None else configured, notes or noted_in())


def known(runtime: Runtime, container: Container) -> Contained:
    """Return what the runtime says of a container that was found by its cgroup and its notes.

    Raises:
        CannotBeMoved: it does not know it, or says something else of it than the kernel does.
    """
    contained = runtime.find(container.id)
    if contained is None:
        raise CannotBeMoved(
            detail=f"{runtime.program} does not know container {container.short}",
            hint="it may be in another store: CONTAINERS_CONF, CONTAINERS_STORAGE_CONF say which",
        )
    if contained.init is None or container.init is None or contained.init != container.init:
        raise CannotBeMoved(detail=f"{runtime.name} says another first process of container {container.short}")
    return contained


def _flags(kept: Kept) -> list[str]:
    given = ["--tcp-established"] if kept.tcp_established else []
    return [*given, *(["--file-locks"] if kept.file_locks else [])]


def _sockets(kept: Kept) -> list[str]:
    return ["--ext-unix-sk"] if kept.ext_unix_sk else []


def _living(pid: int) -> Identity | None:
    if pid <= 0:
        return None
    with contextlib.suppress(LimosaError):
        return Identity.of(pid)
    return None


def _alive(identity: Identity) -> Identity | None:
    return identity if identity.pid > 0 and identity.alive() else None


def _remove(folder: str, name: str) -> None:
    """Remove what a runtime that was ended has left in a folder of its own."""
    if os.path.isabs(folder) and start.trusted(folder):
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(folder, name))


def _criu_said(path: str) -> str:
    """The cause that CRIU's log names; "" where there is none."""
    if not os.path.isabs(path) or not start.trusted(path):
        return ""
    with contextlib.suppress(OSError), open(path, "rb") as log:
        return _named(cause(log.read(64 << 20).decode(errors="replace"), 0))
    return ""


def _criu_said_in(folder: int, name: str) -> str:
    with contextlib.suppress(OSError):
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        with open(fd, "rb") as log:
            return _named(cause(log.read(64 << 20).decode(errors="replace"), 0))
    return ""


def _named(found: Cause) -> str:
    return f"CRIU: {found.text}" if found.raw else ""
