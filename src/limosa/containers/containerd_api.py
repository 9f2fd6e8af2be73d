"""containerd's interface, as far as bringing containers to disk and back needs it.

The numbers of fields are those of ``containerd/api/services/*/v1/*.proto``, which containerd keeps from version to
version. What it says is root's word: its socket is root's, and so is whoever listens there.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec

from limosa.containers import grpc
from limosa.containers.protobuf import Malformed, Message, Value, message
from limosa.errors import CannotBeMoved, FailedUndone

ADDRESS = "CONTAINERD_ADDRESS"
"""The variable that names its socket, for ctr as well."""

OPTIONS = "containerd.runc.v1.Options"
LAYER = "application/vnd.oci.image.layer.v1.tar"
_USUAL = "/run/containerd/containerd.sock"
_SERVICES = "containerd.services"
_LONG = 3600.0  # a diff of a large container
_PIECE = 1 << 20
_LEASE_SECONDS = 24 * 3600
_LEASED_UNTIL = "containerd.io/gc.expire"
_WRITE, _COMMIT = 1, 2
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,75}", re.ASCII)
Fields = tuple[int, Value | Iterable[bytes] | Mapping[str, str]]


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """What it keeps of a container."""

    id: str
    labels: dict[str, str]
    image: str
    runtime: str
    options_type: str
    options: bytes
    spec_type: str
    spec: bytes
    snapshotter: str
    snapshot: str


class Layer(msgspec.Struct, frozen=True):
    """Changes of a root file system, as an archive in its store."""

    digest: str
    size: int

    def described(self) -> bytes:
        """As messages have it."""
        return message((1, LAYER), (2, self.digest), (3, self.size))


def address(configured: Mapping[str, str]) -> str:
    """Return the path of its socket."""
    return configured.get(ADDRESS, _USUAL)


def checked(namespace: str) -> str:
    """Return a namespace's name that may be told to it.

    Raises:
        CannotBeMoved: it may not.
    """
    if not _NAME.fullmatch(namespace):
        raise CannotBeMoved(detail=f"{namespace!r} is no namespace of containerd's")
    return namespace


class Api:
    """Its interface in one namespace.

    Args:
        path: of its socket.
        namespace: of containers.
        lease: what is made is kept for that long; "" for none.
        seconds: how long it may say nothing, where a call does not say that.
    """

    def __init__(self, path: str, namespace: str, lease: str = "", seconds: float = 60.0):
        self.path, self.namespace, self.lease, self.seconds = path, checked(namespace), lease, seconds

    def stream(self, method: str, request: bytes | Iterable[bytes], **options: Any) -> Iterator[Message]:
        """Yield what a method answers; raises as :func:`limosa.containers.grpc.call`."""
        metadata = {"containerd-namespace": self.namespace}
        if self.lease:
            metadata["containerd-lease"] = self.lease
        try:
            options = {"seconds": self.seconds, **options}
            for answer in grpc.call(self.path, f"{_SERVICES}.{method}", request, metadata, **options):
                yield Message(answer)
        except Malformed as error:
            raise FailedUndone(what=method, detail=str(error)) from error

    def ask(self, method: str, *fields: Fields, **options: Any) -> Message:
        """Return what a method answers to one message."""
        answers = list(self.stream(method, message(*fields), **options))
        return answers[0] if answers else Message(b"")

    def _may_miss(self, method: str, *fields: Fields, **options: Any) -> Message | None:
        try:
            return self.ask(method, *fields, **options)
        except grpc.Refused as error:
            if error.status != grpc.NOT_FOUND:
                raise
            return None

    # --- containers and tasks -------------------------------------------------------------------------------

    def container(self, id_: str) -> Record | None:
        """Return the record of a container; None where there is none."""
        found = self._may_miss("containers.v1.Containers/Get", (1, id_))
        if found is None:
            return None
        one = found.message(1)
        runtime, spec = one.message(4), one.message(5)
        return Record(
            id=one.text(1),
            labels=one.texts(2),
            image=one.text(3),
            runtime=runtime.text(1),
            options_type=runtime.message(2).text(1),
            options=runtime.message(2).data(2),
            spec_type=spec.text(1),
            spec=spec.data(2),
            snapshotter=one.text(6),
            snapshot=one.text(7),
        )

    def create(self, record: Record) -> None:
        """Make a record of a container."""
        options = message((1, record.options_type), (2, record.options)) if record.options_type else b""
        made = message(
            (1, record.id),
            (2, record.labels),
            (3, record.image),
            (4, message((1, record.runtime), (2, options))),
            (5, message((1, record.spec_type), (2, record.spec))),
            (6, record.snapshotter),
            (7, record.snapshot),
        )
        self.ask("containers.v1.Containers/Create", (1, made))

    def specify(self, record: Record, spec: bytes) -> None:
        """Change the specification in a container's record, and nothing else: it is for its next task."""
        changed = message((1, record.id), (5, message((1, record.spec_type), (2, spec))))
        self.ask("containers.v1.Containers/Update", (1, changed), (2, message((1, "spec"))))

    def forget(self, id_: str) -> None:
        """Take a container's record away, if it is there."""
        self._may_miss("containers.v1.Containers/Delete", (1, id_))

    def delete_task(self, id_: str) -> None:
        """Take a container's task away that has ended, if it is there."""
        self._may_miss("tasks.v1.Tasks/Delete", (1, id_))

    def task(self, id_: str) -> Message | None:
        """Return what it says of a container's first process (``types.Process``); None where it has none."""
        found = self._may_miss("tasks.v1.Tasks/Get", (1, id_))
        return found.message(1) if found is not None else None

    # --- root file systems ----------------------------------------------------------------------------------

    def parent(self, snapshotter: str, key: str) -> str:
        """Return the snapshot that another began as; "" where there is none."""
        found = self._may_miss("snapshots.v1.Snapshots/Stat", (1, snapshotter), (2, key))
        return found.message(1).text(2) if found is not None else ""

    def has_snapshot(self, snapshotter: str, key: str) -> bool:
        """Return whether there is one."""
        return self._may_miss("snapshots.v1.Snapshots/Stat", (1, snapshotter), (2, key)) is not None

    def prepare(self, snapshotter: str, key: str, parent: str) -> list[bytes]:
        """Make a snapshot; return its mounts."""
        return self.ask("snapshots.v1.Snapshots/Prepare", (1, snapshotter), (2, key), (3, parent)).all(1)

    def mounts(self, snapshotter: str, key: str) -> list[bytes]:
        """Return the mounts of a snapshot."""
        return self.ask("snapshots.v1.Snapshots/Mounts", (1, snapshotter), (2, key)).all(1)

    def remove_snapshot(self, snapshotter: str, key: str) -> None:
        """Take a snapshot away, if it is there."""
        self._may_miss("snapshots.v1.Snapshots/Remove", (1, snapshotter), (2, key))

    def changes(self, snapshotter: str, key: str, parent: str, tick: Callable[[], None]) -> Layer:
        """Have it write what has changed since a snapshot's parent into its store."""
        view = f"limosa-{secrets.token_hex(8)}"
        below = self.ask("snapshots.v1.Snapshots/View", (1, snapshotter), (2, view), (3, parent)).all(1)
        try:
            above = self.mounts(snapshotter, key)
            answer = self.ask(
                "diff.v1.Diff/Diff", (1, below), (2, above), (3, LAYER), (4, view), seconds=_LONG, tick=tick
            )
        finally:
            self.remove_snapshot(snapshotter, view)
        found = answer.message(3)
        return Layer(found.text(2), found.number(3))

    def apply(self, layer: Layer, mounts: list[bytes], tick: Callable[[], None]) -> None:
        """Change what is mounted so as a layer in its store says."""
        self.ask("diff.v1.Diff/Apply", (1, layer.described()), (2, mounts), seconds=_LONG, tick=tick)

    def read(self, layer: Layer, tick: Callable[[], None]) -> Iterator[bytes]:
        """Yield what is in its store."""
        for part in self.stream("content.v1.Content/Read", message((1, layer.digest)), tick=tick):
            yield part.data(2)

    def take_in(self, layer: Layer, fd: int, ref: str, tick: Callable[[], None]) -> None:
        """Have it take a layer into its store, where it is not there yet.

        Args:
            layer: what it must be.
            fd: the file that has it.
            ref: what this is called while it is under way.
            tick: called now and then.
        """

        def parts() -> Iterator[bytes]:
            at = 0
            first: tuple[Fields, ...] = ((2, ref), (3, layer.size), (4, layer.digest))
            while data := os.pread(fd, _PIECE, at):
                yield message((1, _WRITE), *first, (5, at), (6, data))
                at, first = at + len(data), ()
            yield message((1, _COMMIT), *first, (3, layer.size), (4, layer.digest), (5, at))

        try:
            for _ in self.stream("content.v1.Content/Write", parts(), tick=tick):
                pass
        except grpc.Refused as error:
            if error.status != grpc.ALREADY_EXISTS:
                raise

    # --- leases ---------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def leased(self, lease: str) -> Iterator[Api]:
        """What is made by the interface that this yields stays, until the end, or for a day if nobody ends it."""
        until = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + _LEASE_SECONDS))
        self.ask("leases.v1.Leases/Create", (1, lease), (3, {_LEASED_UNTIL: until}))
        try:
            yield Api(self.path, self.namespace, lease)
        finally:
            with contextlib.suppress(grpc.Refused, FailedUndone, CannotBeMoved):  # it ends by itself
                self.end_lease(lease)

    def end_lease(self, lease: str) -> None:
        """Keep no longer what was made so and nothing else keeps."""
        self._may_miss("leases.v1.Leases/Delete", (1, lease))
