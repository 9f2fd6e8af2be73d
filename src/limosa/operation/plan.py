"""``plan``: what a verb would do, and what speaks against it."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import TYPE_CHECKING, Literal, cast, overload

from limosa.errors import UsageError
from limosa.operation import checkpoint_plan, drivers, dump_options, move_plan, restore_options, restore_plan
from limosa.operation.facts import Ask
from limosa.operation.jobs import JobLike, job
from limosa.operation.members import Where
from limosa.operation.options import (
    MoveOptions,
    PlanCheckpointOptions,
    PlanOptions,
    RestoreOptions,
    SuspendOptions,
    ToggleOptions,
    check_names,
    check_seconds,
    release_of,
)
from limosa.operation.results import Plan
from limosa.operation.verbs import CHECKPOINT, verb_of
from limosa.terms import Release

if TYPE_CHECKING:
    from typing_extensions import Unpack

_KNOWN: dict[str, Collection[str]] = {
    "move": MoveOptions.__annotations__,
    "suspend": SuspendOptions.__annotations__,
    "resume": MoveOptions.__annotations__,
    "toggle": ToggleOptions.__annotations__,
    "checkpoint": PlanCheckpointOptions.__annotations__,
}


@overload
def plan(verb: Literal["move", "resume"], like: JobLike, **options: Unpack[MoveOptions]) -> Plan: ...
@overload
def plan(verb: Literal["suspend"], like: JobLike, **options: Unpack[SuspendOptions]) -> Plan: ...
@overload
def plan(verb: Literal["toggle"], like: JobLike, **options: Unpack[ToggleOptions]) -> Plan: ...
@overload
def plan(verb: Literal["checkpoint"], like: JobLike, **options: Unpack[PlanCheckpointOptions]) -> Plan: ...
def plan(verb: str, like: JobLike, **options: Unpack[PlanOptions]) -> Plan:
    """What a verb would do to a job, and what stands against it. Touches nothing.

    The options are the verb's own (:mod:`limosa.operation.options`). Raises NoSuchProcess, and UsageError for a verb or
    an option that is none.
    """
    if verb not in _KNOWN:
        raise UsageError(detail=f"no plan for {verb!r}: {', '.join(_KNOWN)}")
    if unknown := options.keys() - _KNOWN[verb]:
        raise UsageError(detail=f"{verb} has no option {', '.join(sorted(unknown))}")
    check_seconds(max_pause=options.get("max_pause"))
    which = job(like)
    with drivers.using(None) as driver:
        if verb == CHECKPOINT.name:
            if "output" not in options:
                raise UsageError(detail="checkpoint needs output: the image's folder")
            chosen = cast("PlanCheckpointOptions", options)  # none but its own are left
            return checkpoint_plan.look_at(which, driver, dump_options.Options(**chosen)).plan()
        where = Where(to=options.get("to"), source=options.get("source"), gpu_map=options.get("gpu_map"))
        release = release_of(options.get("release", Release.ALL))
        ask = Ask(verb=verb_of(verb), where=where, force=options.get("force", ()), release=release)
        return move_plan.look_at(ask, which, driver, max_pause=options.get("max_pause")).plan()


def plan_restore(image: str | os.PathLike[str], **options: Unpack[RestoreOptions]) -> Plan:
    """What restoring an image would do, and what stands against it; LimosaError: it is none that can be read."""
    check_names("plan_restore", options, RestoreOptions.__annotations__)
    return restore_plan.look_at(image, restore_options.Options(**options))
