"""``limosa cdi``."""

from __future__ import annotations

import os
from pathlib import Path

from limosa.cli.options import folder as path
from limosa.cli.output import Report
from limosa.cli.verb import flag, option, verb
from limosa.errors import PermissionDenied, UsageError

_STDOUT = "-"
_OTHER_USER = "sudo limosa cdi; or another FILE: --output"
_OTHER_FILE = "another FILE, in a folder that only root can change, as /etc/cdi: --output"


@verb(
    option(
        "--output",
        metavar="FILE",
        type=path(),
        help="Write the spec there (default: /etc/cdi/limosa.dev-job.json); - for stdout.",
    ),
    flag("--remove", help="Remove the spec, and libraries that no container has."),
)
def command(report: Report, *, output: Path | None, remove: bool) -> None:
    """Let containers have what limosa run gives a job.

    limosa cdi

    podman run --device limosa.dev/job=shim --device nvidia.com/gpu=0 IMAGE

    Writes a CDI spec for podman, Docker, containerd and CRI-O. A container
    that asks for the device gets the shim: read-only, from a folder of root's,
    without a change to its image, entrypoint or LD_PRELOAD. Needs root. Call
    it again after an update of Limosa. limosa doctor says what a runtime needs
    besides.

    The folder, /usr/local/lib/limosa, is filled with --output - as well: a
    spec must name libraries that are there.
    """
    from limosa import cdi

    to_stdout = output is not None and output.name == _STDOUT
    if remove and to_stdout:
        raise UsageError(detail="--remove and --output -: stdout cannot be removed")
    place = output if output is not None and not to_stdout else cdi.spec_path()
    try:
        if remove:
            gone, kept = cdi.remove(place)
            said = [f"{place} is removed" if gone else f"there is no {place}", *(f"{one} is in use" for one in kept)]
            report.result(
                {"device": cdi.DEVICE, "spec": str(place), "changed": gone, "kept": [str(one) for one in kept]},
                "\n".join(said),
            )
            return
        if to_stdout:
            libraries = cdi.install()
            changed = not libraries.there
        else:
            libraries, changed = cdi.install_with_spec(place)
    except OSError as error:
        detail = f"{error.filename or place}: {error.strerror}"
        raise PermissionDenied(detail=detail, hint=_OTHER_USER if os.geteuid() else _OTHER_FILE) from error
    where = _STDOUT if to_stdout else str(place)
    report.result(
        {"device": cdi.DEVICE, "spec": where, "libraries": str(libraries.folder), "changed": changed, "kept": []},
        cdi.text_of(cdi.shim_spec(libraries)).decode().rstrip()
        if to_stdout
        else f"containers that ask for {cdi.DEVICE} get the shim ({place})",
    )
