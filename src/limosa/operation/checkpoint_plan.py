"""The reasons against writing a job to disk, and what that will cost."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from limosa import gpu
from limosa.errors import NoWorkingCriu, PermissionDenied, Reason, UsageError
from limosa.image import destination_taken, free_bytes, missing_parent
from limosa.image.files import in_memory
from limosa.image.trust import destination_problem, open_named
from limosa.operation import container_options, container_plan
from limosa.operation.dump_options import Options
from limosa.operation.estimate import device_bytes
from limosa.operation.facts import Ask
from limosa.operation.jobs import Job
from limosa.operation.journal import Member
from limosa.operation.move_plan import pause_reasons
from limosa.operation.prepare import Prepared, look, refuse_no_text
from limosa.operation.rules import apply_force, as_reason
from limosa.operation.verbs import CHECKPOINT
from limosa.operation.work import Clock
from limosa.process import hazards, sizes
from limosa.process.criu.find import find as find_criu
from limosa.process.criu.program import Criu
from limosa.process.memory import two
from limosa.process.observe import JobObservation


def look_at(
    which: Job,
    driver: gpu.Driver,
    options: Options,
    clock: Clock | None = None,
    find: Callable[[str | None], Criu] = find_criu,
) -> Prepared:
    """Plans a checkpoint, within the time that ``clock`` gives."""
    box, against = container_plan.boxed(which.root, leave_running=options.leave_running)

    def more(observation: JobObservation, members: Sequence[Member]) -> list[Reason]:
        found: list[Reason] = []
        plugin = True  # without CRIU the plugin is no question
        try:
            plugin = find(options.criu).plugin_dir is not None
        except NoWorkingCriu as error:
            found.append(as_reason(error))
        if box is None:
            found += sizes.checkpoint_sizes(observation)
        criu_sees = observation if box is None else container_plan.as_seen_by_criu(observation)
        of_criu = hazards.checkpoint_hazards(
            criu_sees,
            tcp_established=options.tcp_established,
            tcp_close=options.tcp_close,
            shell_job=options.shell_job,
            file_locks=options.file_locks,
            ghost_limit=options.ghost_limit,
            link_remap=options.link_remap and not options.leave_running,  # CRIU takes the names away at once there
            skip_in_flight=options.skip_in_flight,
            ext_unix_sk=options.ext_unix_sk,
            plugin=plugin,
            cuda_pids=[m.pid for m in members],
        )
        return found + (of_criu if box is None else container_plan.hazards_of(of_criu, criu_sees))

    ask = Ask(verb=CHECKPOINT, leave_running=options.leave_running, force=options.force, more=more)
    prepared = look(which, ask, driver, clock)
    prepared.box = box
    if against:
        of_any = {"mount-namespace", "pid-namespace"}
        prepared.reasons = [*against, *(r for r in prepared.reasons if r.id not in of_any)]
    if box is not None:
        of_options = container_options.of_checkpoint(options, box.runtime, box.contained.network, which.root.pid)
        prepared.reasons = [*of_options, *prepared.reasons, *container_plan.unread_input(which.root)]
    prepared.rate, prepared.output = options.rate, os.fspath(options.output)
    extra = [*_destination_reasons(options, prepared), *_no_effect(options, prepared)]
    extra += pause_reasons(CHECKPOINT.estimate(prepared.shape), options.max_pause)
    prepared.reasons += apply_force(extra, options.force)
    return prepared


def _no_effect(options: Options, prepared: Prepared) -> list[Reason]:
    """Says of options that are about copying while the job runs that nothing will be."""
    given = [name for name, value in (("--rate", options.rate), ("--rounds", options.rounds)) if value is not None]
    if not given or prepared.parked:
        return []
    why = "the driver copies device memory, in the pause" if prepared.members else "the job holds no device memory"
    hint = "started by limosa run, without --no-shim, a job is copied while it computes" if prepared.members else ""
    return [Reason(id="no-effect", text=f"{' and '.join(given)} without effect: {why}", hint=hint)]


def _destination_reasons(options: Options, prepared: Prepared) -> list[Reason]:
    """What stands against the folder: it exists, it could not be trusted later, there is no room."""
    output = Path(os.path.abspath(options.output))
    try:
        refuse_no_text(output)
    except UsageError as error:
        return [as_reason(error)]
    reasons = []
    if not output.parent.is_dir():
        return [as_reason(missing_parent(output.parent))]
    try:
        folder = open_named(output.parent)
        try:
            passes = in_memory(folder)
        finally:
            os.close(folder)
        problem = destination_problem(output)
    except PermissionDenied as error:
        return [as_reason(error)]
    except OSError as error:  # one that may be written to and not read, say: the image is made in it by descriptor
        text = f"{output.parent} cannot be opened: {error.strerror}"
        return [Reason(id="permission", text=text, exit_code=11, hint="choose another folder")]
    if taken := destination_taken(output):
        reasons.append(as_reason(taken))
    if not os.access(output.parent, os.W_OK | os.X_OK):
        reasons.append(Reason(id="permission", text=f"not permitted to write in {output.parent}", exit_code=11))
    if problem:
        text = f"an image there could not be restored later: {problem}"
        reasons.append(
            Reason(id="untrusted-place", text=text, hint="let nobody else write there, or choose another folder")
        )
    if passes:
        text = f"{output.parent} is in memory (tmpfs): the image would be gone with the next boot"
        reasons.append(Reason(id="image-in-memory", text=text, hint="copy it to a disk, if it is to last"))
    need = prepared.host_bytes + device_bytes([m for m in prepared.members if m.was != gpu.State.CHECKPOINTED])
    need += 16 << 20  # CRIU's tables
    free = free_bytes(output)
    if free < need:
        left, needed = two(free, need)
        text = f"{output.parent} has {left} free and about {needed} are needed"
        reasons.append(Reason(id="disk-room", text=text, exit_code=15, hint="choose another disk", forceable=True))
    return reasons
