"""Which container a process is in, by its cgroup, and what the runtime calls it.

The kernel says in which cgroup a process is. A container can make further cgroups below its own, and call them like
another container's; so the outermost one that is a container's counts. Where a container has none of its own (a
rootless one, with version 1), its pid namespace says it, if it is that of the first process of a noted one; and so it
does where several were given the same cgroup. Names come from what the runtimes note (``state.py``), never from a
process.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator, Sequence

import msgspec

from limosa.containers.state import MADE_ID, State, read, states
from limosa.errors import NoSuchProcess, UsageError
from limosa.process.cgroups import cgroup_mounts
from limosa.process.identity import Identity
from limosa.process.namespaces import namespace_of, namespaces_above
from limosa.process.slurp import slurp

RUNTIMES = ("podman", "docker", "containerd", "cri-o", "runc", "crun")
_SHORT = 12
_MOST_CGROUPS = 1 << 20
# As the runtimes call cgroups, where nothing is noted that may be read: another user's, say.
_CALLED = re.compile(
    r"(?:(?P<kind>libpod|docker|crio|cri-containerd|nerdctl)-(?:payload-)?)?(?P<id>[0-9a-f]{64})(?:\.scope)?", re.ASCII
)
_KINDS = {
    "libpod": "podman",
    "docker": "docker",
    "crio": "cri-o",
    "cri-containerd": "containerd",
    "nerdctl": "containerd",
}
_POD = re.compile(r".*pod[0-9a-f]{8}[-_][0-9a-f_-]{27}(?:\.slice)?", re.ASCII)
_MANAGERS = {"libpod": "podman", "cri-o": "cri-o"}
_NAMES = ("io.kubernetes.cri.container-name", "io.kubernetes.container.name", "nerdctl/name")
_PODS = ("io.kubernetes.cri.sandbox-name", "io.kubernetes.pod.name", "io.kubernetes.cri-o.PodName")
_NAMESPACES = ("io.kubernetes.cri.sandbox-namespace", "io.kubernetes.pod.namespace")


class Container(msgspec.Struct, frozen=True, kw_only=True):
    """A container, as its runtime calls it."""

    runtime: str  # one of RUNTIMES
    id: str
    name: str = ""
    pod: str = ""
    namespace: str = ""  # of the pod
    init: Identity | None = None  # its first process, where the runtime notes it and it lives
    cgroup: str = ""  # the path that all its processes are in, or below

    @property
    def short(self) -> str:
        """The id as runtimes show it: what somebody has chosen as a whole."""
        return self.id[:_SHORT] if MADE_ID.fullmatch(self.id) else self.id

    @property
    def called(self) -> str:
        """What a command line takes for it: ``podman:train``."""
        return f"{self.runtime}:{self.name or self.short}"

    def is_meant(self, word: str) -> bool:
        """Whether that is its name, its pod's with the name, its id, or the beginning of one that a runtime has made.

        With runc and ctr people choose ids: ``train`` is not ``train-2``.
        """
        names = {self.name, f"{self.pod}/{self.name}", f"{self.namespace}/{self.pod}/{self.name}", self.id}
        return word in names - {"", "/", "//"} or (
            len(word) > 2 and self.id.startswith(word) and MADE_ID.fullmatch(self.id) is not None
        )


class _Named(msgspec.Struct):
    """One of ``containers.json`` (containers/storage), which podman and CRI-O have."""

    id: str
    names: list[str] | None = None


class _OfDocker(msgspec.Struct, rename="pascal"):
    """``config.v2.json``."""

    name: str = ""


class Containers:
    """The containers of this machine, as the runtimes have noted them just now."""

    def __init__(self) -> None:
        self._stored: dict[str, dict[str, str]] = {}
        self._known: dict[str, list[Container]] = {}  # by the path of a cgroup, in whatever hierarchy
        self._firsts: dict[tuple[int, int], Container] = {}  # by the pid namespace that its first process has
        mounts = cgroup_mounts()
        for state in states():
            noted = self._noted(state)
            namespace = namespace_of(noted.init.pid, "pid") if noted.init is not None else None
            if namespace is not None and namespace != namespace_of("self", "pid"):
                self._firsts.setdefault(namespace, noted)
            for path in {in_hierarchy(path, mounts) for path in state.cgroups}:
                self._known.setdefault(path, []).append(noted)
        self._known.pop("/", None)  # everything is in that

    def of(self, pid: int) -> Container | None:
        """Return the container that a process is in.

        None where it is in none, has gone, or is in a cgroup of several and in none of their pid namespaces alone.
        """
        paths = _cgroups_of(pid)
        part = self._noted_cgroup(paths)
        if part:
            noted = self._known[part]
            one = _living_of(noted) or noted[:1]
            one = one if len(one) == 1 else _told_apart(one, pid)
            return msgspec.structs.replace(one[0], cgroup=part) if len(one) == 1 else None
        found = next((found for path in paths if (found := _by_name(path)) is not None), None)
        if found is None and (namespace := namespace_of(pid, "pid")) is not None:
            return self._firsts.get(namespace)  # a rootless one need not have a cgroup of its own
        return found

    def sharing(self, pid: int) -> list[Container]:
        """Return the containers that live in the cgroup which a process's container has: more than one by a mistake.

        What is done to the cgroup of one of them, to hold it still or to give it a GPU, is done to all.
        """
        part = self._noted_cgroup(_cgroups_of(pid))
        return _living_of(self._known[part]) if part else []

    def _noted_cgroup(self, paths: list[str]) -> str:
        """The outermost cgroup that is a noted container's; "" for none."""
        return next((part for path in paths for part in _outermost_first(path) if part in self._known), "")

    def meant(self, word: str, runtime: str = "") -> Container:
        """Return the container of a name, or of an id's beginning.

        Args:
            word: the name, POD/NAME, NAMESPACE/POD/NAME or an id.
            runtime: one of :data:`RUNTIMES`; "" for any.

        Raises:
            NoSuchProcess: none that runs is called so.
            UsageError: several are.
        """
        found = {
            c.id: c
            for c in (*itertools.chain(*self._known.values()), *self._firsts.values())
            if c.init is not None and runtime in ("", c.runtime) and c.is_meant(word)
        }
        exact = {id_: c for id_, c in found.items() if word in (c.name, c.id)}
        found = exact if len(exact) == 1 else found
        if not found:
            where = f" in {runtime}" if runtime else ""
            hint = "limosa ps lists those that run with a GPU"
            raise NoSuchProcess(f"no container {word} runs here{where}", pid=0, hint=hint)
        if len(found) > 1:
            listed = ", ".join(sorted(f"{c.called} ({c.short})" for c in found.values()))
            raise UsageError(detail=f"{word} may be several containers: {listed}", hint="give more of its id")
        return next(iter(found.values()))

    def _noted(self, state: State) -> Container:
        notes = state.notes
        runtime = _called_after(state) or _MANAGERS.get(notes.get("io.container.manager", ""), "")
        if not runtime and "/docker/" in f"{state.folder}/":
            runtime = "docker"
        if not runtime and "/containerd/" in f"{state.folder}/":
            runtime = "docker" if state.folder.endswith("/moby") else "containerd"
        runtime = runtime or state.by
        if runtime == "podman":
            notes = {}  # an image says what is in there (its manifest's annotations): its own name is podman's to say
        name = _first(notes, _NAMES) or self._name(runtime, state)
        return Container(
            runtime=runtime,
            id=state.id,
            name=name,
            pod=_first(notes, _PODS),
            namespace=_first(notes, _NAMESPACES),
            init=_living(state),
        )

    def _name(self, runtime: str, state: State) -> str:
        if runtime == "docker":
            docker = read(f"/var/lib/docker/containers/{state.id}", "config.v2.json", _OfDocker)
            return docker.name.lstrip("/") if docker is not None else ""
        if runtime not in _MANAGERS.values():
            return state.id
        store = os.path.dirname(os.path.dirname(state.bundle.rstrip("/")))  # STORE/ID/userdata
        if store not in self._stored:
            listed = [
                one
                for file in ("containers.json", "volatile-containers.json")
                for one in read(store, file, list[_Named]) or []
            ]
            self._stored[store] = {one.id: one.names[0] for one in listed if one.names}
        return self._stored[store].get(state.id, "")


def own_lines(cgroup_file: str, cgroup: str) -> str:
    """Return ``/proc/PID/cgroup`` of a process in a container as one in the container's own cgroup has it.

    A container can make a cgroup below its own that is called like the whole way to that.

    Args:
        cgroup_file: the text.
        cgroup: the container's own.
    """
    lines = [line.split(":", 2) for line in cgroup_file.split("\n") if line.count(":") >= 2]
    return "\n".join(f"{n}:{kinds}:{cgroup}" for n, kinds, path in lines if f"{path}/".startswith(f"{cgroup}/"))


def in_hierarchy(folder: str, mounts: list[tuple[str, str]]) -> str:
    """Return a cgroup's path in its hierarchy, as ``/proc/PID/cgroup`` has it; runc notes where that is mounted, too.

    Args:
        folder: what is noted.
        mounts: where the hierarchies are (:func:`limosa.process.cgroups.cgroup_mounts`).
    """
    for root, mount_point in mounts:
        if folder == mount_point or folder.startswith(f"{mount_point}/"):
            return f"{root.rstrip('/')}{folder[len(mount_point) :]}" or "/"
    return folder


def _cgroups_of(pid: int) -> list[str]:
    """The cgroups of a process, each once; none where it has gone."""
    try:
        text = os.fsdecode(slurp(f"/proc/{pid}/cgroup", most=_MOST_CGROUPS))
    except OSError:
        return []
    return list(dict.fromkeys(line.split(":", 2)[2] for line in text.split("\n") if line.count(":") >= 2))


def _living_of(noted: Sequence[Container]) -> list[Container]:
    """Those that live, each once, in however many folders it is noted."""
    return list({one.init: one for one in reversed(noted) if one.init is not None}.values())[::-1]


def _told_apart(several: Sequence[Container], pid: int) -> list[Container]:
    """Those of several containers whose pid namespace a process is in: with the innermost that is one's."""
    for namespace in namespaces_above(pid, "pid"):
        found = [c for c in several if c.init is not None and namespace_of(c.init.pid, "pid") == namespace]
        if found:
            return found
    return []


def _outermost_first(path: str) -> Iterator[str]:
    parts = [part for part in path.split("/") if part]
    for n in range(1, len(parts) + 1):
        yield "/" + "/".join(parts[:n])


def _called_after(state: State) -> str:
    """The runtime that the cgroups of a container are called after, with its id in their names; "" for none.

    An image can have podman note another one (an annotation of its manifest).
    """
    forms = (_CALLED.fullmatch(part) for path in state.cgroups for part in path.split("/"))
    return next((_KINDS[form["kind"]] for form in forms if form and form["kind"] and form["id"] == state.id), "")


def _by_name(path: str) -> Container | None:
    """The container that a cgroup is called after, where no runtime's notes of it can be read."""
    above = ""
    for part in _outermost_first(path):
        form = _CALLED.fullmatch(os.path.basename(part))
        if form is not None:
            kind = _KINDS.get(form["kind"] or "", "")
            if not kind and os.path.basename(above) == "docker":
                kind = "docker"
            if not kind and _POD.fullmatch(os.path.basename(above)):
                kind = "containerd"
            if kind:
                return Container(runtime=kind, id=form["id"], cgroup=part)
        above = part
    return None


def _living(state: State) -> Identity | None:
    identity = Identity(state.pid, state.start_time)
    return identity if state.pid > 0 and identity.alive() else None


def _first(notes: dict[str, str], keys: tuple[str, ...]) -> str:
    return next((notes[key] for key in keys if notes.get(key)), "")
