"""The check "containers": whether the container runtimes of this machine bring the shim along (``limosa cdi``)."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from limosa import cdi
from limosa.cdi import place
from limosa.cdi.runtimes import Runtime, runtimes
from limosa.errors import LimosaError
from limosa.operation.doctor_gpu import Check, ok, warn

_NEEDS_ROOT = "sudo limosa doctor --fix, or: sudo limosa cdi"


def containers(*, fix: bool, log: Callable[[str], None]) -> Check:
    """Look at the runtimes, and at our CDI spec; ``fix`` writes the spec, and nothing of a runtime's."""
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
    told = [f"{one.name}: {one.problem}" for one in found if one.problem]
    hints = [one.hint for one in found if one.problem]
    if wrong:
        told.insert(0, wrong)
        hints.insert(0, _NEEDS_ROOT if os.geteuid() else "limosa doctor --fix, or: limosa cdi")
    if told:
        return warn("containers", f"{names}; {'; '.join(told)}", "; ".join(hints))
    return ok("containers", f"{names}: containers that ask for {cdi.DEVICE} get the shim", more=_where(found))


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
