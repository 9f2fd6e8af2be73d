"""Telling containerd which GPU a container has now: its record says what the next task of the container gets.

In the specification there, the device node of a GPU that the container has lost, and the rule for it, become those of
the GPU that it has been given. All else stays as it is written, byte by byte. What is told is made of what is there, as
with the nodes themselves (``devices.py``): whatever an operation that was killed has left, nothing of it is noted.

The record is that of whoever has made the container. So it is asked for by the namespace in which runc notes the
container that was found by its cgroup, and believed if containerd says the same first process. It can have another
device written there only by naming one of the operation's own GPUs, and into that same record.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping

import msgspec

from limosa.containers import calls, grpc
from limosa.containers.containerd_api import Api, Record, address
from limosa.containers.devices import node_and_number
from limosa.containers.find import Container
from limosa.containers.protobuf import Malformed
from limosa.containers.state import namespace_of, states
from limosa.errors import LimosaError
from limosa.process.identity import Identity
from limosa.structs import ready

_PODS = "k8s.io"
_OF_CRI = "io.cri-containerd.kind"
_PID = 3  # types.Process
_SECONDS = 2.0
_Fields = dict[str, msgspec.Raw]
_List = list[msgspec.Raw]


class _Entry(msgspec.Struct):
    """A device node, or a rule for one."""

    path: str = ""
    type: str = ""
    major: int | None = None
    minor: int | None = None
    allow: bool = True

    @property
    def number(self) -> tuple[int, int]:
        """Of a character device; of no GPU where it names none, or several."""
        if self.type != "c" or self.major is None or self.minor is None:
            return (-1, -1)
        return self.major, self.minor


class _Strange(ValueError):
    """What the record says is not what the container runs with."""


def refusal(container: Container, minors: Collection[int], known: Collection[int]) -> str:
    """Return why containerd cannot be told that a container has these GPUs, in words; "" where it can.

    Args:
        container: one of its.
        minors: of the GPUs that the container is to have.
        known: of all GPUs of the operation; other devices are left alone.
    """
    return _in_words(container, minors, known, tells=False)


def tell(
    container: Container,
    minors: Collection[int],
    known: Collection[int],
    configured: Mapping[str, str] | None = None,
) -> str:
    """Have a container's record name these GPUs. Return why it does not, in words; "" where it does.

    Args:
        container: one of containerd's.
        minors: of the GPUs that it has.
        known: of all GPUs of the operation; other devices are left alone.
        configured: by which variables (:func:`limosa.containers.calls.settings`); None: the caller's.
    """
    return _in_words(container, minors, known, tells=True, configured=configured)


def _in_words(
    container: Container,
    minors: Collection[int],
    known: Collection[int],
    *,
    tells: bool,
    configured: Mapping[str, str] | None = None,
) -> str:
    try:
        api, record = _record_of(container, calls.settings() if configured is None else configured)
        spec = changed(record.spec, minors, known)
        if tells and spec != record.spec:
            api.specify(record, spec)
    except OSError as error:
        return error.strerror or str(error)
    except (LimosaError, grpc.Refused, Malformed, _Strange) as error:
        return str(error)
    except (ValueError, RecursionError):  # a DecodeError is one
        return "its specification cannot be read"
    return ""


def _record_of(container: Container, configured: Mapping[str, str]) -> tuple[Api, Record]:
    """What containerd has of it, of the one that lives: another namespace may have another of that id."""
    noted = (s for s in states() if s.id == container.id and Identity(s.pid, s.start_time) == container.init)
    namespace = next(filter(None, map(namespace_of, noted)), "")
    if not namespace or namespace == _PODS or container.pod:
        raise _Strange("it is a pod's" if namespace else "runc has noted it in no namespace of containerd's")
    api = Api(address(configured), namespace, seconds=_SECONDS)
    record, task = api.container(container.id), api.task(container.id)
    if record is None or task is None or container.init is None or task.number(_PID) != container.init.pid:
        raise _Strange("containerd says another first process")
    if _OF_CRI in record.labels:
        raise _Strange("it is a pod's")
    return api, record


def changed(spec: bytes, minors: Collection[int], known: Collection[int]) -> bytes:
    """Return a specification with the nodes of these GPUs instead of those that it names.

    Args:
        spec: it.
        minors: of the GPUs.
        known: of all GPUs of the operation.

    Raises:
        ValueError: it cannot be read, or names other GPUs than the container can have been started with.
        OSError: a GPU has no node on this machine.
    """
    there = {minor: node_and_number(minor) for minor in {*minors, *known}}
    by_number = {_split(number): minor for minor, (_, number) in there.items()}
    top = _read(spec)
    linux = _read(top.get("linux", b"{}"))
    resources = _read(linux.get("resources", b"{}"))
    nodes, rules = (_read_list(of.get("devices", b"[]")) for of in (linux, resources))
    named = set()
    for entry in map(_entry, nodes):
        if (minor := by_number.get(entry.number)) is not None:
            named.add(minor)
            if entry.path != there[minor][0]:
                raise _Strange(f"its record has a GPU as {entry.path}")
    gone, come = sorted(named - set(minors)), sorted(set(minors) - named)
    if len(gone) != len(come):
        raise _Strange("its record names other GPUs than it was given")
    if not gone:
        return spec
    if {_split(there[new][1]) for new in come} & {_entry(rule).number for rule in rules}:
        raise _Strange("its record has a rule of its own for that GPU")
    instead = {_split(there[old][1]): there[new] for old, new in zip(gone, come, strict=True)}
    resources["devices"] = _raw([_exchanged(rule, instead) for rule in rules])
    linux |= {"devices": _raw([_exchanged(node, instead) for node in nodes]), "resources": _raw(resources)}
    return msgspec.json.encode({**top, "linux": linux})


def _exchanged(raw: msgspec.Raw, instead: Mapping[tuple[int, int], tuple[str, int]]) -> msgspec.Raw:
    """A node, or a rule that allows, with another GPU in it where it names one of those."""
    entry = _entry(raw)
    found = instead.get(entry.number)
    if found is None or not entry.allow:
        return raw
    path, number = found
    major, minor = map(_raw, _split(number))
    fields = {**_read(raw), "major": major, "minor": minor}
    return _raw({**fields, "path": _raw(path)} if entry.path else fields)


def _split(number: int) -> tuple[int, int]:
    return os.major(number), os.minor(number)


def _entry(raw: msgspec.Raw) -> _Entry:
    return msgspec.json.decode(raw, type=ready(_Entry))


def _read(raw: bytes | msgspec.Raw) -> _Fields:
    return msgspec.json.decode(raw, type=ready(_Fields))


def _read_list(raw: bytes | msgspec.Raw) -> _List:
    return msgspec.json.decode(raw, type=ready(_List))


def _raw(what: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(what))
