"""runc alone: its containers have bundles that somebody else makes and keeps."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from limosa.containers import calls
from limosa.containers.calls import Said
from limosa.containers.find import in_hierarchy
from limosa.containers.runc_leftovers import begun, take_away, unmount_root
from limosa.containers.runtime import (
    JOINED,
    MACHINES,
    PRIVATE,
    SHARES,
    Contained,
    Kept,
    Runtime,
    alive,
    bound,
    check_name,
    criu_said_in,
    end,
    flags,
    sockets,
)
from limosa.containers.state import OF_CONTAINERD, State, folders, read, states
from limosa.errors import CannotBeMoved, FailedUndone
from limosa.image import ContainerRecord
from limosa.process.cgroups import cgroup_mounts
from limosa.process.criu.stats import DumpStats, dump_stats, restore_stats
from limosa.process.identity import Identity
from limosa.start import trusted

_AT_WORK_SECONDS = 10.0
_TICK = 0.05


class _Namespace(msgspec.Struct):
    type: str
    path: str = ""


class _Linux(msgspec.Struct, rename="camel"):
    namespaces: list[_Namespace] = []
    cgroups_path: str = ""


class _Mount(msgspec.Struct):
    type: str = ""
    source: str = ""
    options: list[str] = []


class _Process(msgspec.Struct):
    terminal: bool | None = None


class _Root(msgspec.Struct):
    path: str = ""
    readonly: bool = False


class Spec(msgspec.Struct):
    """What is read of a container's specification (config.json)."""

    linux: _Linux = msgspec.field(default_factory=_Linux)
    mounts: list[_Mount] = []
    root: _Root = msgspec.field(default_factory=_Root)
    process: _Process | None = None

    def writes(self, bundle: str) -> list[str]:
        """Return what of the machine it lets its container change, in words.

        Args:
            bundle: its bundle, which paths in it are of.
        """
        binds = [m for m in self.mounts if m.type == "bind" or {"bind", "rbind"} & set(m.options)]
        return [w for m in binds if "ro" not in m.options for w in bound(os.path.join(bundle, m.source))]

    def root_of(self, bundle: str) -> list[str]:
        """Return its root file system, in words; none where that is read-only."""
        return [] if self.root.readonly or not self.root.path else bound(os.path.join(bundle, self.root.path))

    def against(self) -> list[tuple[str, str]]:
        """Return what of it keeps its container from coming back."""
        if self.process is None or not self.process.terminal:
            return []
        return [("container-terminal", "it has a terminal, and nobody would take it at a restore")]

    def namespaces(self) -> dict[str, str]:
        """Return the namespaces that it has: kind → path of the one that it joins, or ""."""
        return {one.type: one.path for one in self.linux.namespaces}

    @property
    def cgroup(self) -> str:
        """The cgroup that it is to have, as it is called in there; "" where its runtime chooses one."""
        path = self.linux.cgroups_path
        return os.path.normpath(path) if path else ""


class Runc(Runtime):
    """runc alone: its containers have bundles that somebody else makes and keeps."""

    name = "runc"

    def __init__(self, program: str, configured: Mapping[str, str], notes: Sequence[str]):
        super().__init__(program, configured, notes)
        self._anothers: set[str] = set()  # names that were taken when they were to be used

    def find(self, word: str) -> Contained | None:
        state = self._state(word)
        if state is None:
            return None
        spec = read(state.bundle, "config.json", Spec)
        namespaces = spec.namespaces() if spec is not None else {}
        against = []
        if spec is None:
            text = f"its bundle {state.bundle} cannot be read, or others can change it"
            against.append(("container-bundle", text))
        else:
            against += joined_namespaces(namespaces)
            against += spec.against()
        return Contained(
            id=state.id,
            name=state.id,
            init=alive(Identity(state.pid, state.start_time)),
            run=f"{state.pid}@{state.start_time}",
            bundle=state.bundle,
            network=network_of(namespaces),
            writes=tuple(_writes(spec, state.bundle)),
            against=tuple(against),
        )

    def write(self, contained: Contained, kept: Kept) -> DumpStats:
        state = self._state(contained.id)
        if state is None:
            raise CannotBeMoved(detail=f"container {contained.id} has ended")
        return write_by_runc(self.program, self.configured, state, kept)

    def against_return(self, record: ContainerRecord, name: str, bundle: str) -> list[tuple[str, str, str]]:
        found = []
        taken = ("container-name", f"runc has a container {name} already", "another name with --name")
        if self.find(name) is not None:
            found.append(taken)
        elif there := self._begun(name):
            place = f"{there[0]}/{name}"
            text = f"somebody has begun to make a container {name}, and it is not there yet: {place}"
            hint = (
                f"another name with --name; where nobody is at it, umount {place}/criu-root, and remove what is empty"
            )
            found.append(("container-name", text, hint))
        given, place = bundle or record.bundle, self.bundle_of(record, bundle)
        if living := next((s.id for s in states(self.notes) if s.bundle and os.path.realpath(s.bundle) == place), ""):
            if living == name:  # it has come since
                return [taken]
            text = f"another container lives in the bundle {place}: {living}"
            found.append(("container-bundle", text, "--bundle names a bundle of its own for this one"))
        elif not trusted(given) or (spec := read(place, "config.json", Spec)) is None:  # nor a link on the way to it
            text = f"there is no bundle {place} whose config.json only root can change"
            found.append(("container-bundle", text, "--bundle names one with the same root file system"))
        elif other := self._in_cgroup(spec.cgroup):
            text = f"container {other} lives in the control group that {place}/config.json names, {spec.cgroup}"
            found.append(("container-bundle", text, "give its config.json another linux.cgroupsPath"))
        else:
            found += [(id_, f"{place}/config.json: {text}", "a bundle without one") for id_, text in spec.against()]
        return found

    def bundle_of(self, record: ContainerRecord, bundle: str) -> str:
        return os.path.realpath(bundle or record.bundle)  # as runc notes it, which makes it its working directory

    def may_write(self, record: ContainerRecord, bundle: str) -> list[str]:
        return _writes(read(bundle, "config.json", Spec), bundle)  # the one that it is to have says so itself

    def alone(self, record: ContainerRecord, name: str, bundle: str) -> tuple[list[str], list[str]]:
        made, used = super().alone(record, name, bundle)
        place = self.bundle_of(record, bundle)
        spec = read(place, "config.json", Spec)
        cgroup = [f"control group {spec.cgroup}"] if spec is not None and spec.cgroup else []
        return [*made, f"bundle {place}", *cgroup], used

    def _in_cgroup(self, cgroup: str) -> str:
        """The container that lives in a cgroup, as a config.json names it; "" for none.

        A name may be one of below the cgroup that runc itself is in, or of below systemd: so what the others' bundles
        say is compared as well.
        """
        mounts = cgroup_mounts()
        here = {os.path.normpath(f"{root}/{cgroup}") for root, _ in mounts} if os.path.isabs(cgroup) else set()
        for state in states(self.notes) if cgroup else ():
            if alive(Identity(state.pid, state.start_time)) is None:
                continue
            spec = read(state.bundle, "config.json", Spec)
            if not here.isdisjoint(in_hierarchy(path, mounts) for path in state.cgroups) or (
                spec is not None and spec.cgroup == cgroup
            ):
                return state.id
        return ""

    def taken_since(self, record: ContainerRecord, name: str, bundle: str) -> list[tuple[str, str, str]]:
        return self.against_return(record, name, bundle)  # what has the name would be taken for what was made

    def bring_back(self, record: ContainerRecord, name: str, bundle: str, kept: Kept) -> Contained:
        if since := self.taken_since(record, name, bundle):
            self._anothers.add(name)
            raise FailedUndone(what="runc restore", detail=since[0][1], hint=since[0][2])
        known_ = folders(self.notes)
        folder = record.folder if record.folder in known_ else known_[0]
        folders_ = ["--image-path", f"/proc/self/fd/{kept.images_fd}", "--work-path", f"/proc/self/fd/{kept.work_fd}"]
        log = os.memfd_create("limosa-runc", os.MFD_CLOEXEC)
        try:
            said = self._run(
                "--root", folder, "--log", f"/proc/self/fd/{log}", "restore", "--detach", *folders_,
                *flags(kept), *sockets(kept), "--bundle", self.bundle_of(record, bundle), "--", check_name(name),
                criu_folder=kept.criu_folder, pass_fds=[kept.images_fd, kept.work_fd, log],
                speaks=False, output=kept.output, on_start=kept.on_start, tick=kept.tick,
            )  # fmt: skip
            words = os.pread(log, 1 << 16, 0).decode(errors="replace")
        finally:
            os.close(log)
        found = self.find(name)
        if said.rc or found is None or found.init is None:
            why = criu_said_in(kept.work_fd, "restore.log") or Said(said.rc, b"", words).why
            if said.rc > 0 and "already exists" in why:
                self._anothers.add(name)
            raise FailedUndone(what="runc restore", detail=why)
        return msgspec.structs.replace(found, stats=restore_stats(kept.work_fd) if kept.stats else {})

    def made_as(self, name: str, operation: str, record: ContainerRecord) -> str:
        return name

    def rename(self, contained: Contained, name: str) -> None:
        """It has it."""

    def remove_made(self, word: str, bundle: str, operation: str) -> None:
        if word in self._anothers:
            return
        found = self.find(word)
        if found is None:
            self._remove_begun(word)
        elif os.path.realpath(found.bundle) == os.path.realpath(bundle):
            self.remove(found.id)

    def _remove_begun(self, name: str) -> None:
        """Take away what a runc that was killed has begun."""
        end = time.monotonic() + _AT_WORK_SECONDS
        while (there := self._begun(name)) and self._at_work(name):  # somebody is just making one of that name
            if time.monotonic() > end:
                text = f"runc is at work on a container {name}, and {there[0]}/{name} may be its"
                raise FailedUndone(what="runc delete", detail=text)
            time.sleep(_TICK)
        for folder in there:
            take_away(folder, name)

    def _at_work(self, name: str) -> bool:
        """Whether a runc is; what a container calls itself is no word about it."""
        program, here = os.path.basename(self.program), os.stat("/proc/self/ns/pid")
        for pid, words in calls.command_lines():
            with contextlib.suppress(OSError):
                if (
                    name in words[1:]
                    and os.path.basename(os.readlink(f"/proc/{pid}/exe")) == program
                    and os.path.samestat(os.stat(f"/proc/{pid}/ns/pid"), here)
                ):
                    return True
        return False

    def _begun(self, name: str) -> list[str]:
        return [folder for folder in folders(self.notes) if not _is_anothers(folder) and begun(folder, name)]

    def _state(self, id_: str) -> State | None:
        found = (s for s in states(self.notes) if s.id == id_ and s.by == "runc" and not _is_anothers(s.folder))
        return next(found, None)

    def remove(self, id_: str, on_start: Callable[[Identity], None] = calls.nobody) -> None:
        state = self._state(id_)
        if state is None:
            return
        unmount_root(state.folder, id_)

        def begins(who: Identity) -> None:
            on_start(who)
            if not _is_the_same(self._state(id_), state):
                raise _Anew
            end(Identity(state.pid, state.start_time), state.cgroups)

        # Not by --force: that takes away what is noted by then, though somebody has started it anew, and it lives.
        try:
            said = self._run("--root", state.folder, "delete", "--", id_, on_start=begins)
        except _Anew:
            return
        if said.rc and _is_the_same(self._state(id_), state):
            raise FailedUndone(what="runc delete", detail=said.why)


class _Anew(Exception):
    """Somebody has started a container anew, or taken it away."""


def _is_the_same(found: State | None, before: State) -> bool:
    """Whether runc notes the same run of a container as before."""
    return found is not None and (found.pid, found.start_time) == (before.pid, before.start_time)


def _is_anothers(folder: str) -> bool:
    """Whether containers that are noted there are not those of runc alone, or of podman."""
    return folder.startswith((f"{OF_CONTAINERD}/", "/run/docker/")) or os.path.basename(folder) == "crun"


def _writes(spec: Spec | None, bundle: str) -> list[str]:
    return [*spec.root_of(bundle), *spec.writes(bundle)] if spec is not None else []


def network_of(namespaces: Mapping[str, str]) -> str:
    """Return what a container has of a network, by its namespaces: kind → path of the one that it joins, or ""."""
    if "network" not in namespaces:
        return MACHINES
    return JOINED if namespaces["network"] else PRIVATE


def joined_namespaces(namespaces: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return what stands against a container by its namespaces: kind → path of the one that it joins, or ""."""
    joined = [kind for kind, path in namespaces.items() if path and kind != "network"]
    found = [(SHARES, f"its {kind} namespace is another's") for kind in joined]
    if "pid" not in namespaces or "mount" not in namespaces:
        found.append((SHARES, "it has the host's pid or mount namespace"))
    return found


def write_by_runc(program: str, configured: Mapping[str, str], state: State, kept: Kept) -> DumpStats:
    """Have runc write a container that it has noted; return CRIU's statistics, if asked for.

    Raises:
        FailedUndone: it failed, and the container is as it was.
    """
    folders_ = ["--image-path", f"/proc/self/fd/{kept.images_fd}", "--work-path", f"/proc/self/fd/{kept.work_fd}"]
    argv = [program, "--root", state.folder, "checkpoint", "--leave-running", *folders_, *flags(kept)]
    said = calls.call(
        [*argv, *sockets(kept), "--", state.id],
        configured,
        criu_folder=kept.criu_folder,
        pass_fds=[kept.images_fd, kept.work_fd],
        on_start=kept.on_start,
        tick=kept.tick,
    )
    if said.rc:
        raise FailedUndone(what="runc checkpoint", detail=criu_said_in(kept.work_fd, "dump.log") or said.why)
    return dump_stats(kept.work_fd) if kept.stats else DumpStats()
