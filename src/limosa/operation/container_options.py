"""Which options of ``checkpoint`` and ``restore`` have an effect on a container, and which are refused.

What a container's runtime sees to by itself, and what nothing could be done with, is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable

from limosa.containers.runtime import Runtime
from limosa.errors import Reason
from limosa.image import ContainerRecord
from limosa.operation import dump_options, restore_options

_TERMINAL = "its runtime gives it its terminal"
_PODMAN = "podman has no such option"


def of_checkpoint(options: dump_options.Options, runtime: Runtime, pid: int) -> list[Reason]:
    """Return a refusal for each option of ``checkpoint`` that has no effect on a container.

    Args:
        options: what was asked for.
        runtime: the container's.
        pid: its first process.
    """
    against = [
        ("--shell-job", options.shell_job, _TERMINAL),
        # CRIU takes such names away at once where what it has dumped runs on, as a container does until the commit.
        ("--link-remap", options.link_remap, "its runtime lets it run on until the image is committed"),
        ("--ext-unix-sk", options.ext_unix_sk and runtime.name == "podman", _PODMAN),
    ]
    return _refused(against, pid)


def of_restore(options: restore_options.Options, record: ContainerRecord | None) -> list[Reason]:
    """Return a refusal for each option of ``restore`` that has no effect on what the image has.

    Args:
        options: what was asked for.
        record: the container; None: the job was in none that its runtime has written.
    """
    if record is None:
        text = "{} is for containers, and the image has none"
        given = [
            ("--name", options.name is not None),
            ("--bundle", options.bundle is not None),
            ("--log", options.log is not None),
        ]
        return [
            Reason(id="container-option", text=text.format(name), exit_code=2) for name, is_given in given if is_given
        ]
    against = [
        ("--attach", options.adopt, f"its output and its end are its runtime's ({_follow(record)})"),
        ("--rewind-files", options.rewind_files, "its files come back as its runtime brings them"),
        ("--cgroup", options.cgroup is not None, "its runtime makes its control group"),
        ("--shell-job", options.shell_job, _TERMINAL),
        ("--log", options.log is not None and record.runtime == "podman", "podman keeps its output (podman logs)"),
    ]
    return _refused(against)


def _follow(record: ContainerRecord) -> str:
    return "podman logs -f, podman wait" if record.runtime == "podman" else "limosa wait"


def _refused(against: Iterable[tuple[str, bool, str]], pid: int = 0) -> list[Reason]:
    return [
        Reason(
            id="container-option",
            text=f"{name} has no effect on a container: {why}",
            exit_code=2,
            hint=f"leave out {name}",
            pid=pid,
        )
        for name, given, why in against
        if given
    ]
