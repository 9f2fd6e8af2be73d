"""The check "containers": whether the container runtimes of this machine bring the shim along (``limosa cdi``)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence

from limosa import cdi, start
from limosa.cdi import place
from limosa.cdi.runtimes import Runtime, looked_at, runtimes
from limosa.cdi.switch import switch_on
from limosa.containers.calls import command_lines
from limosa.errors import LimosaError
from limosa.operation.doctor_gpu import Check, ok, warn
from limosa.process.namespaces import is_ours

_NEEDS_ROOT = "sudo limosa doctor --fix, or: sudo limosa cdi"


def containers(*, fix: bool, log: Callable[[str], None]) -> Check:
    """Look at the runtimes, and at our CDI spec.

    ``fix`` writes the spec, and has CDI on where a runtime has it off because nobody has said anything about it.
    """
    found = runtimes()
    if not found:
        return ok("containers", "there is no podman, Docker, containerd or CRI-O")
    names = ", ".join(f"{one.name} {one.version}".strip() for one in found)
    wrong = spec_problem()
    if wrong and fix and os.geteuid() == 0:
        log(f"writing {cdi.spec_path()}")
        try:
            cdi.install_with_spec(cdi.spec_path())
            wrong = spec_problem()
        except (LimosaError, OSError) as error:
            wrong = str(error)
    if fix and os.geteuid() == 0:
        found = [_switched_on(one, log) for one in found]
    told = [f"{one.name}: {one.problem}" for one in found if one.problem]
    hints = [f"{'limosa doctor --fix, or ' if one.unsaid else ''}{one.hint}" for one in found if one.problem]
    if wrong:
        told.insert(0, wrong)
        hints.insert(0, _NEEDS_ROOT if os.geteuid() else "limosa doctor --fix, or: limosa cdi")
    if told:
        return warn("containers", f"{names}; {'; '.join(told)}", "; ".join(hints))
    return ok("containers", f"{names}: containers that ask for {cdi.DEVICE} get the shim", more=_where(found))


def _switched_on(one: Runtime, log: Callable[[str], None]) -> Runtime:
    """A runtime as it is once CDI was switched on, where that could be done; it has to be started again then."""
    if one.unsaid is None:
        return one
    if pid := _told_otherwise(one.name):
        return one._replace(problem=f"{one.problem}, and process {pid} has a configuration of its own", unsaid=None)
    try:
        if not switch_on(one):
            return one._replace(unsaid=None)
    except OSError as error:
        return one._replace(problem=f"{one.problem} ({error})")
    log(f"wrote {one.unsaid}: CDI is on; {one.name} was not restarted")
    now = looked_at(one.name) or one
    problems = [f"CDI is on in {one.unsaid} from its next start on", now.problem]
    hints = [f"systemctl restart {one.name.lower()}, when its containers allow that", now.hint]
    return now._replace(problem="; ".join(filter(None, problems)), hint="; ".join(filter(None, hints)))


def _told_otherwise(name: str) -> int:
    """The daemon that runs here and reads another file, or has been given features, which may be in one place; or 0."""
    program = start.program({"Docker": "dockerd"}.get(name, name))
    for pid, words in command_lines():
        options = {word.lstrip("-").partition("=")[0] for word in words[1:] if word.startswith("-")}
        with contextlib.suppress(OSError):
            if (
                options & {"feature", "config-file", "config", "c"}
                and is_ours(pid, "pid")  # a container's is not asked for its files, which may never answer
                and program is not None
                and os.readlink(f"/proc/{pid}/exe") == os.path.realpath(program)
            ):
                return pid
    return 0


def spec_problem() -> str:
    """What is wrong with our CDI spec on this machine; "" for nothing."""
    there = cdi.installed_spec()
    if there is None:
        return "no CDI spec of Limosa's: containers have no shim, and take the driver's way"
    path, spec = there
    try:
        folder = place.current()
    except LimosaError as error:
        return error.message
    if spec != cdi.shim_spec(cdi.Libraries(folder, there=True)):
        return f"{path} is of another Limosa"
    return "" if place.complete(folder) else f"{folder}, which containers mount, is not there"


def _where(found: Sequence[Runtime]) -> str:
    """Where each looks for specs."""
    return "; ".join(f"{one.name} looks into {', '.join(one.folders)}" for one in found)
