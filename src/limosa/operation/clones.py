"""Containers that were made of the same one: what of the machine two of them would change, by mistake."""

from __future__ import annotations

import contextlib

from limosa.containers import Containers
from limosa.containers.runtime import Contained, Runtime
from limosa.containers.runtimes import known
from limosa.errors import CannotBeMoved, LimosaError, Reason
from limosa.image import ContainerRecord
from limosa.process.identity import Identity
from limosa.process.records import ClonedRecord

ID = "clone-shares"
_MOST = 1000  # names in a claim


def keep_record(record: ContainerRecord, root: Identity) -> None:
    """Note of a container that was brought back what it was made of, for as long as it lives.

    Args:
        record: what the image says of it.
        root: its first process.
    """
    with contextlib.suppress(LimosaError, OSError):  # it runs
        ClonedRecord(root=root, origin=_origin(record)).save()


def in_the_way(record: ContainerRecord, runtime: Runtime, bundle: str) -> list[Reason]:
    """Return a refusal for each living container that is the original, or a clone of it, and changes the same.

    Others may use it on purpose, as they did before.

    Args:
        record: what the image says of the one that is to come.
        runtime: its runtime.
        bundle: its bundle, as the runtime has it.
    """
    wanted = set(runtime.may_write(record, bundle))
    found = []
    for one in _made_of_the_same(record, runtime) if wanted else []:
        if both := sorted(wanted & set(one.writes)):
            text = f"container {runtime.name}:{one.name}, of which this is a clone or a twin, runs and may change "
            text += f"{', '.join(both)} as well"
            hint = f"end that one first; --force={ID} if they are made for it"
            found.append(Reason(id=ID, text=text, exit_code=23, hint=hint, forceable=True))
    return found


def claimed(record: ContainerRecord, runtime: Runtime, bundle: str) -> list[str]:
    """Return what a restore is to claim, so that no other clone that would share it begins at the same time."""
    return [f"{word} of {_origin(record)}'s" for word in runtime.may_write(record, bundle)[:_MOST]]


def _origin(record: ContainerRecord) -> str:
    return record.origin or f"{record.runtime}:{_word(record)}"


def _word(record: ContainerRecord) -> str:
    """What its runtime takes for the container that an image was made of."""
    return f"{record.namespace}/{record.id}" if record.namespace else record.id


def _made_of_the_same(record: ContainerRecord, runtime: Runtime) -> list[Contained]:
    """The containers that live and were made of the same one; that one; and the one that the image was made of."""
    found: dict[str, Contained] = {}
    for word in {_word(record), _origin(record).partition(":")[2]}:
        with contextlib.suppress(CannotBeMoved):  # it has ended meanwhile
            original = runtime.find(word)
            if original is not None and original.init is not None:
                found[original.id] = original
    containers = Containers()
    for one in ClonedRecord.all():
        container = containers.of(one.root.pid) if one.origin == _origin(record) else None
        if container is not None and container.init == one.root:
            with contextlib.suppress(CannotBeMoved):
                contained = known(runtime, container)
                found[contained.id] = contained
    return list(found.values())
