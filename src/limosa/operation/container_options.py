"""Which options of ``checkpoint`` and ``restore`` have an effect on a container, and which are refused.

What a container's runtime sees to by itself, and what nothing could be done with, is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from limosa.containers.published import Published
from limosa.containers.runtime import JOINED, MACHINES, PRIVATE, Runtime, is_port
from limosa.errors import InvalidArgument, Reason
from limosa.image import ContainerRecord
from limosa.operation import dump_options, restore_options

_PUBLISH = re.compile(
    r"(?P<host>(?:[0-9.]+:|\[[^\]]+\]:)?[0-9]+):(?P<inside>[0-9]{1,5})(?:/(?P<protocol>tcp|udp|sctp))?", re.ASCII
)
_TERMINAL = "its runtime gives it its terminal"
_PODMAN = "podman has no such option"


def of_checkpoint(options: dump_options.Options, runtime: Runtime, network: str, pid: int) -> list[Reason]:
    """Return a refusal for each option of ``checkpoint`` that has no effect on a container.

    Args:
        options: what was asked for.
        runtime: the container's.
        network: what it has of one.
        pid: its first process.
    """
    against = [
        ("--shell-job", options.shell_job, _TERMINAL),
        # CRIU takes such names away at once where what it has dumped runs on, as a container does until the commit.
        ("--link-remap", options.link_remap, "its runtime lets it run on until the image is committed"),
        ("--ext-unix-sk", options.ext_unix_sk and runtime.name == "podman", _PODMAN),
        (
            "--tcp-established",
            options.tcp_established and not options.leave_running and network == MACHINES,
            "its network is the machine's, which tells its peers that it has gone",
        ),
        (
            "--tcp-established",
            options.tcp_established and not options.leave_running and network == JOINED,
            "its network was there before it, and would be shut for all who are in there",
        ),
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
            ("--publish", bool(options.publish)),
        ]
        return [
            Reason(id="container-option", text=text.format(name), exit_code=2) for name, is_given in given if is_given
        ]
    no_ports = "" if record.network == PRIVATE else "it has no network that ports could be led to"
    no_ports = no_ports if record.runtime == "podman" else "its runtime publishes none"
    against = [
        ("--attach", options.adopt, f"its output and its end are its runtime's ({_follow(record)})"),
        ("--rewind-files", options.rewind_files, "its files come back as its runtime brings them"),
        ("--cgroup", options.cgroup is not None, "its runtime makes its control group"),
        ("--shell-job", options.shell_job, _TERMINAL),
        ("--log", options.log is not None and record.runtime == "podman", "podman keeps its output (podman logs)"),
        ("--publish", bool(options.publish and no_ports), no_ports),
    ]
    return _refused(against)


def as_asked(record: ContainerRecord, options: restore_options.Options) -> ContainerRecord:
    """Return a container's record with the ports of the machine that it is to have.

    Raises:
        InvalidArgument: one of ``--publish`` cannot be understood.
    """
    if not options.publish:
        return record
    published = [_published(one) for one in options.publish]
    for one in published:
        if published.count(one) > 1:
            raise InvalidArgument(detail=f"--publish names port {one.port}/{one.protocol} of the machine twice")
    ports = {one.port for one in published if one.protocol == "tcp" and not one.address}
    others = [str(one) for one in published if one.protocol != "tcp" or one.address]
    return msgspec.structs.replace(record, ports=sorted(ports), published=others)


def _published(word: str) -> Published:
    found = _PUBLISH.fullmatch(word)
    if found is not None and is_port(found["inside"]):
        published = Published.of(f"{found['host']}/{found['protocol'] or 'tcp'}")
        if published is not None:
            return published
    text = f"--publish {word!r} cannot be understood"
    raise InvalidArgument(detail=text, hint="HOST:CONTAINER, such as 8081:80, 127.0.0.1:8081:80 or 5353:53/udp")


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
