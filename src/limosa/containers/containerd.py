"""containerd: a container's host side by runc, which containerd's shim has made it with; all else by its interface.

runc writes a container by the notes that the shim has it keep, and containerd has no part in that. What has changed in
the root file system is a layer (``rootfs-diff.tar``) that containerd computes and applies, whatever its snapshotter.
What a container is made of (``containerd.json``) goes along: here it has no bundle that lasts.

A container comes back as a new one: a snapshot of the image with that layer, a record, and a task that begins from
CRIU's files. A shim starts runc for that, and finds CRIU on its PATH. So this one task's shim is started by a small
script (:func:`_shim`), which puts the lent CRIU first.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from limosa import start
from limosa.containers import calls, grpc
from limosa.containers.containerd_api import OPTIONS, Api, Layer, Record, address
from limosa.containers.containerd_leftovers import Leftovers
from limosa.containers.protobuf import Malformed, Message, message
from limosa.containers.runc import Spec, joined_namespaces, network_of, write_by_runc
from limosa.containers.runc_leftovers import unmount_root
from limosa.containers.runtime import (
    SHARES,
    Contained,
    Kept,
    Runtime,
    alive,
    check_name,
    criu_said_in,
)
from limosa.containers.state import OF_CONTAINERD, State, namespace_of, states
from limosa.errors import CannotBeMoved, FailedUndone, LimosaError
from limosa.image import ContainerRecord
from limosa.process.criu.lent import kept_places, stopped_children
from limosa.process.criu.stats import DumpStats, restore_stats
from limosa.process.identity import Identity
from limosa.process.openat import closing, open_in
from limosa.structs import ready

DIFF, MADE_OF = "rootfs-diff.tar", "containerd.json"
"""What is beside CRIU's files in an image: changes in the root file system, and what the container is made of."""

_RUNTIME = "io.containerd.runc.v2"
_SHIM = "containerd-shim-runc-v2"
_RESTORED_BY = "limosa.dev/restored-by"
_POD, _POD_NAMESPACE = "io.kubernetes.pod.name", "io.kubernetes.pod.namespace"
_KIND, _SANDBOX = "io.cri-containerd.kind", "sandbox"
_RESTARTED, _NERDCTL = "containerd.io/restart.status", "nerdctl/"
_BINARY, _CRIU_IMAGES, _CRIU_WORK = 6, 10, 11  # runc's options
_OF_RUNC = (1, 2, 3, 4, 5, 7, 9)  # those of a task that a restored one has as well; no path of a program
_PID, _STATUS, _STDOUT, _STDERR, _TERMINAL = 3, 4, 6, 7, 8  # types.Process
_PAUSED = 4  # types.Status
_MOST_BYTES = 8 << 20
_KILL_SECONDS = 60.0
_RESTORE_SECONDS = 3600.0
_OLD_SECONDS = 24 * 3600.0
_TICK = 0.05
_SIGKILL = 9


class MadeOf(msgspec.Struct, frozen=True, kw_only=True):
    """``containerd.json``: what a container is made of besides CRIU's files."""

    image: str
    labels: dict[str, str]
    options: bytes  # runc's, as the shim takes them
    spec_type: str
    spec: bytes
    snapshotter: str
    parent: str  # the snapshot that its root file system began as
    digest: str  # of the layer of changes
    size: int
    stdout: str = ""
    stderr: str = ""


class _Word(msgspec.Struct, frozen=True):
    """A container's namespace and id, and the operation that makes it: "default/train/restore-1234-5e6f"."""

    namespace: str
    id: str
    operation: str = ""

    @classmethod
    def of(cls, text: str) -> _Word | None:
        parts = text.split("/")
        return cls(*parts) if len(parts) in (2, 3) else None

    @property
    def lease(self) -> str:
        """What keeps what is made, while it is under way."""
        return f"limosa-{self.operation}"

    @property
    def snapshot(self) -> str:
        """What its root file system is called."""
        return f"{self.id}-{self.operation}"


class Containerd(Runtime):
    """containerd with its shim for runc."""

    name = "containerd"
    needs = "runc"

    # --- what it says ---------------------------------------------------------------------------------------

    def find(self, word: str) -> Contained | None:
        """Take an id of a container that runs, or "NAMESPACE/ID"."""
        with _in_words("containerd"):
            named = _Word.of(word)
            state = self._noted(word)
            namespace = named.namespace if named is not None else namespace_of(state)
            if not namespace:
                return None
            api = self._api(namespace)
            record = api.container(word if named is None else named.id)
            return None if record is None else self._contained(api, record, state)

    def _contained(self, api: Api, record: Record, state: State | None) -> Contained:
        task, init, parent = api.task(record.id), None, ""
        if state is not None and task is not None and task.number(_PID) == state.pid:
            init = alive(Identity(state.pid, state.start_time))
        if record.snapshot:
            parent = api.parent(record.snapshotter, record.snapshot)
        pod = f"{record.labels.get(_POD_NAMESPACE, '')}/{record.labels[_POD]}" if _POD in record.labels else ""
        stdout = task.text(_STDOUT) if task is not None else ""
        spec = _spec(record)
        return Contained(
            id=record.id,
            name=record.id,
            init=init,
            run=str(task.number(_PID) or "") if task is not None else "",
            paused=task is not None and task.number(_STATUS) == _PAUSED,
            image=record.image,
            image_id=parent,
            bundle=state.bundle if state is not None else "",
            network=network_of(spec.namespaces()),
            writes=tuple(spec.writes("/")),
            log=stdout.removeprefix("file://") if stdout.startswith("file:///") else "",
            namespace=api.namespace,
            snapshotter=record.snapshotter,
            pod=pod,
            stays=_why_it_stays(record, pod),
            against=tuple(_against(record, spec, task, pod, parent)),
        )

    def _noted(self, word: str) -> State | None:
        """What runc has noted of a container that the shim has had it make."""
        named = _Word.of(word)
        for state in states(self.notes):
            namespace = namespace_of(state)
            wanted = _Word(namespace, word) if named is None else named
            if namespace and (state.id, namespace) == (wanted.id, wanted.namespace):
                return state
        return None

    def _api(self, namespace: str) -> Api:
        return Api(address(self.configured), namespace)

    # --- to disk --------------------------------------------------------------------------------------------

    def write(self, contained: Contained, kept: Kept) -> DumpStats:
        word = f"{contained.namespace}/{contained.id}"
        with _in_words("writing the container"):
            api, state = self._api(contained.namespace), self._noted(word)
            record, task = api.container(contained.id), api.task(contained.id)
            if state is None or record is None or task is None:
                raise CannotBeMoved(detail=f"container {contained.id} has ended")
            own = Message(record.options).text(_BINARY)
            program = start.program(own) if os.path.isabs(own) else None
            stats = write_by_runc(program or self.program, self.configured, state, kept)
            layer = self._write_changes(api, contained, record, kept)
            made_of = MadeOf(
                image=record.image,
                labels=record.labels,
                options=record.options,
                spec_type=record.spec_type,
                spec=record.spec,
                snapshotter=record.snapshotter,
                parent=contained.image_id,
                digest=layer.digest,
                size=layer.size,
                stdout=task.text(_STDOUT),
                stderr=task.text(_STDERR),
            )
            with _new_file(kept.images_fd, MADE_OF) as fd:
                _write_all(fd, msgspec.json.encode(made_of))
            return stats

    def _write_changes(self, api: Api, contained: Contained, record: Record, kept: Kept) -> Layer:
        with api.leased(f"limosa-{secrets.token_hex(8)}") as leased, _new_file(kept.images_fd, DIFF) as fd:
            layer = leased.changes(record.snapshotter, record.snapshot, contained.image_id, kept.tick)
            for part in leased.read(layer, kept.tick):
                _write_all(fd, part)
            return layer

    # --- and back -------------------------------------------------------------------------------------------

    def against_return(self, record: ContainerRecord, name: str, bundle: str) -> list[tuple[str, str, str]]:
        if record.pod:
            text = f"the container was pod {record.pod}'s, whose network and volumes its kubelet sees to"
            return [("container-pod", text, "limosa inspect, verify and rm work with the image")]
        found = []
        if bundle:
            text = "containerd makes the bundles of its containers itself"
            found.append(("container-bundle", text, "leave out --bundle"))
        with _in_words("containerd"):
            api = self._api(record.namespace)
            _shim_program(api.path)
            if api.container(name) is not None:
                text = f"containerd has a container {name} in namespace {record.namespace} already"
                hint = f"another name with --name, or ctr -n {record.namespace} containers delete {name}"
                found.append(("container-name", text, hint))
            if not api.has_snapshot(record.snapshotter, record.image_id):
                text = f"containerd does not have the image {record.image} that it was made of, unpacked"
                found.append(("container-image", text, f"ctr -n {record.namespace} images pull, or import"))
        return found

    def made_as(self, name: str, operation: str, record: ContainerRecord) -> str:
        return f"{record.namespace}/{name}/{operation}"

    def alone(self, record: ContainerRecord, name: str, bundle: str) -> tuple[list[str], list[str]]:
        return super().alone(record, f"{record.namespace}/{name}", bundle)

    def bring_back(self, record: ContainerRecord, name: str, bundle: str, kept: Kept) -> Contained:
        word = _Word.of(name)
        assert word is not None
        check_name(word.id)
        try:
            with _in_words("making the container"), self._api(word.namespace).leased(word.lease) as api:
                made_of = _read_made_of(kept.images_fd)
                mounts = api.prepare(made_of.snapshotter, word.snapshot, made_of.parent)
                _apply(api, made_of, word, mounts, kept)
                made = _record(made_of, word, record.name)
                api.create(made)
                _end_stale(api, made.id)
                self._start(api, made, made_of, kept)
        except BaseException as error:
            why = criu_said_in(kept.work_fd, "restore.log") if isinstance(error, FailedUndone) else ""
            with contextlib.suppress(LimosaError, OSError):  # the undo tries again, and says so
                self.remove_made(name, bundle, word.operation)  # now: the CRIU is lent no longer than this
            if why:
                raise FailedUndone(what="containerd's restore", detail=why) from error
            raise
        found = self.find(f"{word.namespace}/{word.id}")
        if found is None or found.init is None:
            raise FailedUndone(what="containerd's restore", detail=f"{word.id} ended at once")
        return msgspec.structs.replace(found, stats=restore_stats(kept.work_fd) if kept.stats else {})

    def _start(self, api: Api, made: Record, made_of: MadeOf, kept: Kept) -> None:
        """Start the task: the shim's runc brings it back from CRIU's files."""
        own = f"/proc/{os.getpid()}/fd"
        criu = message((_CRIU_IMAGES, f"{own}/{kept.images_fd}"), (_CRIU_WORK, f"{own}/{kept.work_fd}"))
        texts = [_own_log(text, made.id, kept) for text in (made_of.stdout, made_of.stderr)]
        stdout, stderr = (text if _may_log(text) else "" for text in texts)
        api.ask(
            "tasks.v1.Tasks/Create",
            (1, made.id),
            (3, api.mounts(made.snapshotter, made.snapshot)),
            (5, stdout),
            (6, stderr),
            (9, message((1, OPTIONS), (2, made.options + criu))),
            (10, _shim(api, made.id, kept.criu_folder)),
        )
        end_children = stopped_children(kept.criu_folder)

        def tick() -> None:
            end_children()
            kept.tick()

        api.ask("tasks.v1.Tasks/Start", (1, made.id), seconds=_RESTORE_SECONDS, tick=tick)

    def rename(self, contained: Contained, name: str) -> None:
        """It has it."""

    # --- away -----------------------------------------------------------------------------------------------

    def remove_made(self, word: str, bundle: str, operation: str) -> None:
        made = _Word.of(word)
        if made is None or not made.operation:
            return  # that word of the operation's says all
        with _in_words(f"taking {made.id} away"):
            api = self._api(made.namespace)
            record = api.container(made.id)
            if record is not None and record.labels.get(_RESTORED_BY) == made.operation:
                _end(api, record, self, made.operation)
            api.end_lease(made.lease)  # and with it what nothing else keeps

    def remove(self, id_: str, on_start: Callable[[Identity], None] = calls.nobody) -> None:
        named = _Word.of(id_)
        namespace = named.namespace if named is not None else namespace_of(self._noted(id_))
        with _in_words(f"ending {id_}"):
            api = self._api(namespace) if namespace else None
            record = api.container(named.id if named is not None else id_) if api is not None else None
            if api is not None and record is not None:
                _end(api, record, self)

    def word_of(self, contained: Contained) -> str:
        return f"{contained.namespace}/{contained.id}"


def _end_stale(api: Api, id_: str) -> None:
    """Take a task away that has ended, and whose container was taken away: that name is ours now.

    Raises:
        FailedUndone: it runs, and stays.
    """
    try:
        api.delete_task(id_)
    except BaseException as error:
        api.forget(id_)  # ours; else what undoes this would end that task
        if not isinstance(error, grpc.Refused):
            raise
        text = f"a task {id_} is there, and its container is gone ({error})"
        hint = f"ctr -n {api.namespace} tasks delete --force {id_}"
        raise FailedUndone(what="making the container", detail=text, hint=hint) from error


def _end(api: Api, record: Record, runtime: Containerd, operation: str = "") -> None:
    """End a container's task, and take its record and its root file system away.

    Args:
        api: of its namespace.
        record: containerd's.
        runtime: whose runc it is.
        operation: which was restoring it, where it did not come to its end.
    """
    end, known = time.monotonic() + _KILL_SECONDS, True
    while True:
        with contextlib.suppress(grpc.Refused):
            api.ask("tasks.v1.Tasks/Kill", (1, record.id), (3, _SIGKILL), (4, 1))
        unmount_root(f"{OF_CONTAINERD}/{api.namespace}", record.id)
        try:
            api.ask("tasks.v1.Tasks/Delete", (1, record.id))
            break
        except grpc.Refused as error:
            if error.status == grpc.NOT_FOUND:
                known = False
                break
            if time.monotonic() > end:
                raise
        time.sleep(_TICK)
    Leftovers(api.namespace, record.id, operation, known).see_off(runtime.program, runtime.configured)
    api.forget(record.id)
    if record.snapshot:
        api.remove_snapshot(record.snapshotter, record.snapshot)
    for place in kept_places("shims"):
        with contextlib.suppress(OSError):
            (place / _called(api, record.id)).unlink()


# --- what stands against it -----------------------------------------------------------------------------------


def _spec(record: Record) -> Spec:
    with contextlib.suppress(msgspec.DecodeError):
        return msgspec.json.decode(record.spec, type=ready(Spec))
    return Spec()


def _why_it_stays(record: Record, pod: str) -> str:
    """Why ending a container would not end it for good."""
    if pod:
        return f"kubelet starts it anew in pod {pod} when it ends"
    if record.labels.get(_RESTARTED) == "running":
        return "containerd was told to start it anew when it ends"
    return ""


def _against(record: Record, spec: Spec, task: Message | None, pod: str, parent: str) -> Iterator[tuple[str, str]]:
    if record.runtime != _RUNTIME or record.options_type not in ("", OPTIONS):
        yield "container-runtime", f"its runtime is {record.runtime} with {record.options_type}, not {_RUNTIME}"
    if any(label.startswith(_NERDCTL) for label in record.labels):
        yield "container-runtime", "nerdctl has made it, and keeps notes of its own of it"
    if record.labels.get(_KIND) == _SANDBOX:
        yield SHARES, "it is what holds the namespaces of a pod"
    if task is not None and task.number(_TERMINAL):
        yield "container-terminal", "it has a terminal, and containerd's shim brings none back"
    if not record.snapshot or not parent:
        yield "container-image", "its root file system is no snapshot of an image"
    if not pod:
        yield from joined_namespaces(spec.namespaces())


# --- making it ------------------------------------------------------------------------------------------------


def _read_made_of(folder: int) -> MadeOf:
    """Raises FailedUndone: the image does not say what the container is made of."""
    try:
        with closing(open_in(folder, MADE_OF, os.O_RDONLY)) as fd:
            data = os.pread(fd, _MOST_BYTES + 1, 0)
        if len(data) > _MOST_BYTES:
            raise ValueError("it is too large")
        return msgspec.json.decode(data, type=ready(MadeOf))
    except (OSError, ValueError) as error:  # a DecodeError is one
        raise FailedUndone(what=f"reading {MADE_OF}", detail=str(error)) from error


def _apply(api: Api, made_of: MadeOf, word: _Word, mounts: list[bytes], kept: Kept) -> None:
    """Bring the changes into a new root file system."""
    layer = Layer(made_of.digest, made_of.size)
    with closing(open_in(kept.images_fd, DIFF, os.O_RDONLY)) as fd:
        api.take_in(layer, fd, word.lease, kept.tick)
    api.apply(layer, mounts, kept.tick)


def _record(made_of: MadeOf, word: _Word, before: str) -> Record:
    """The record of the new container."""
    options = Message(made_of.options)
    kept = [(n, options.last(n)) for n in _OF_RUNC]
    program = options.text(_BINARY)
    if os.path.isabs(program) and start.program(program):
        kept.append((_BINARY, program.encode()))
    return Record(
        id=word.id,
        labels={**made_of.labels, _RESTORED_BY: word.operation},
        image=made_of.image,
        runtime=_RUNTIME,
        options_type=OPTIONS,
        options=message(*kept),
        spec_type=made_of.spec_type,
        spec=made_of.spec if word.id == before else _in_own_cgroup(made_of.spec, word.id),
        snapshotter=made_of.snapshotter,
        snapshot=word.snapshot,
    )


def _in_own_cgroup(spec: bytes, name: str) -> bytes:
    """A specification for a container of another name, whose cgroup is beside the one that it was written for."""
    try:
        told: dict[str, Any] = msgspec.json.decode(spec, type=ready(dict[str, Any]))
        path = told["linux"]["cgroupsPath"]
        mark = ":" if ":" in path else "/"  # systemd's: SLICE:PREFIX:NAME
        told["linux"]["cgroupsPath"] = f"{path.rpartition(mark)[0]}{mark}{name}"
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError) as error:
        raise FailedUndone(what="naming the container's cgroup", detail=str(error)) from error
    return msgspec.json.encode(told)


def _own_log(uri: str, id_: str, kept: Kept) -> str:
    """Where a container's output goes: one of another name, a clone perhaps, has a file of its own beside the first."""
    return uri if kept.own_name or not uri.startswith("file://") else f"{uri}.{id_}"


def _may_log(uri: str) -> bool:
    """Whether output may go where an image says: to a file that only root can change. It names no program to start."""
    path = uri.removeprefix("file://")
    return uri.startswith("file:///") and start.trusted(path) and (not os.path.lexists(path) or os.path.isfile(path))


def _shim_program(path: str) -> str:
    """The shim that containerd starts: on the PATH, or beside containerd itself.

    Raises:
        CannotBeMoved: there is none that only root can change.
    """
    found = start.program(_SHIM)
    if found is None:
        with contextlib.suppress(OSError):
            found = start.program(os.path.join(os.path.dirname(os.readlink(f"/proc/{grpc.peer_of(path)}/exe")), _SHIM))
    if found is None:
        raise CannotBeMoved(detail=f"there is no {_SHIM} on the PATH that only root can change, nor beside containerd")
    return found


def _called(api: Api, id_: str) -> str:
    return f"{api.namespace}.{id_}"


def _shim(api: Api, id_: str, criu_folder: str) -> str:
    """Write the script by which containerd starts one container's shim, with the lent CRIU first on its PATH.

    It stays as long as the container: containerd cleans up by it after a shim that has died. The folder of the lent
    CRIU is gone by then, and nobody but root can make another of that name.
    """
    program, names = _shim_program(api.path), {f"{namespace_of(s)}.{s.id}" for s in states()}
    places = kept_places("shims")
    for place in places:
        for old in place.iterdir():
            with contextlib.suppress(OSError):  # those of restores that have not come so far are newer
                if old.name not in names and time.time() - old.lstat().st_mtime > _OLD_SECONDS:
                    old.unlink()
    path = Path(places[0], _called(api, id_))
    new = path.with_name(f".{path.name}")
    # Its runc would empty that (runc_leftovers.py).
    mounted = shlex.quote(f"{OF_CONTAINERD}/{api.namespace}/{id_}/criu-root")
    new.write_text(
        f"#!/bin/sh\nPATH={shlex.quote(criu_folder)}:$PATH\nexport PATH\n"
        f'case " $* " in *" delete "*) command -p umount -l {mounted} 2>/dev/null ;; esac\n'
        f'exec {shlex.quote(program)} "$@"\n'
    )
    new.chmod(0o700)
    new.replace(path)
    return str(path)


# --- files, errors --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _new_file(folder: int, name: str) -> Iterator[int]:
    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
    with closing(fd):
        yield fd


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


@contextlib.contextmanager
def _in_words(what: str) -> Iterator[None]:
    """What containerd refuses is an error of ours."""
    try:
        yield
    except (grpc.Refused, Malformed) as error:
        raise FailedUndone(what=what, detail=str(error)) from error
