"""Container runtimes that write a container to disk and bring it back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from limosa import start
from limosa.containers import calls
from limosa.containers.containerd import Containerd
from limosa.containers.find import Container
from limosa.containers.podman import Podman
from limosa.containers.runc import Runc
from limosa.containers.runtime import Contained, Runtime
from limosa.containers.state import noted_in, states
from limosa.errors import CannotBeMoved


def folder_of(contained: Contained) -> str:
    """Return the folder in which runc keeps the state of a container, "" where it is not runc's."""
    return next((s.folder for s in states() if s.id == contained.id), "")


_KINDS: Mapping[str, type[Runtime]] = {kind.name: kind for kind in (Podman, Runc, Containerd)}


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
            detail=f"containers of {name} cannot be written to disk", hint=f"those of {', '.join(_KINDS)} can"
        )
    program = program or start.program(kind.needs or name)
    if program is None:
        raise CannotBeMoved(detail=f"there is no program {kind.needs or name} on the PATH that only root can change")
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
