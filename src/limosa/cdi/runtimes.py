"""Whether the container runtimes of this machine read CDI specs, and what each needs to be told.

Only looked at, by their own programs where these print what is in force. ``switch`` writes to their configuration.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from limosa import start
from limosa.cdi.spec import FOLDERS

DOCKER_CONFIG = Path("/etc/docker/daemon.json")
CONTAINERD_CONFIG = Path("/etc/containerd/config.toml")
CRIO_CONFIGS = (Path("/etc/crio/crio.conf"), Path("/etc/crio/crio.conf.d"))
_VERSION = re.compile(r"\bv?(\d+)\.(\d+)(?:\.(\d+))?")
_SWITCH = re.compile(r"^\s*enable_cdi\s*=\s*(true|false)", re.MULTILINE)
_DIRS = re.compile(r"^\s*cdi_spec_dirs\s*=\s*\[([^\]]*)\]", re.MULTILINE)
_QUOTED = re.compile(r"[\"']([^\"']*)[\"']")
MOST_BYTES = 1 << 20
"""Of a configuration."""

# The first versions that know CDI, and of Docker the first that has it switched on.
PODMAN, CONTAINERD, CRIO = (4, 1, 0), (1, 7, 2), (1, 23, 0)
DOCKER, DOCKER_ON = (25, 0, 0), (28, 3, 0)

Version = tuple[int, int, int]


class Runtime(NamedTuple):
    """A runtime that is there.

    Attributes:
        name: "podman".
        version: as it says itself; "" where it does not.
        problem: why it does not bring devices of a CDI spec into containers; "" for no reason.
        hint: what to do about that.
        folders: where it looks for specs.
        unsaid: its configuration, where that could have CDI on and says nothing of it; None for anything else.
    """

    name: str
    version: str
    problem: str = ""
    hint: str = ""
    folders: tuple[str, ...] = FOLDERS
    unsaid: Path | None = None


def runtimes() -> list[Runtime]:
    """Return the runtimes that this machine has, each as it is set up."""
    found = [_podman(), _docker(), _containerd(), _crio()]
    return [one for one in found if one is not None]


def looked_at(name: str) -> Runtime | None:
    """Return one of them, as it is set up now; None where it has gone."""
    return next((one for one in runtimes() if one.name == name), None)


def _podman() -> Runtime | None:
    said = _says("podman", "--version")
    return None if said is None else _judged("podman", said, PODMAN)


def _docker(config: Path | None = None) -> Runtime | None:
    said = _says("dockerd", "--version")
    if said is None:
        return None
    found = _judged("Docker", said, DOCKER)
    config = config or DOCKER_CONFIG
    try:
        told = json.loads(_text(config) or "{}")
        on = told.get("features", {}).get("cdi")
        folders = tuple(map(str, told.get("cdi-spec-dirs") or FOLDERS))
    except (ValueError, AttributeError, TypeError, RecursionError):
        return found._replace(problem=f"{config} cannot be read as JSON", hint=f"mend {config}")
    if found.problem:
        return found
    version = _version(said)
    if on is False or (on is None and version is not None and version < DOCKER_ON):
        hint = f'{config}: "features": {{"cdi": true}}, then restart Docker'
        return found._replace(problem="its feature cdi is off", hint=hint, unsaid=config if on is None else None)
    return _looking(found._replace(folders=folders), f'{config}: "cdi-spec-dirs"')


def _containerd() -> Runtime | None:
    said = _says("containerd", "--version")
    if said is None:
        return None
    found = _judged("containerd", said, CONTAINERD)
    if found.problem:
        return found
    config = CONTAINERD_CONFIG
    dump = _says("containerd", "config", "dump")
    if dump is None:
        return found._replace(problem="it does not print its configuration", hint="containerd config dump")
    switch = _SWITCH.search(dump)
    if switch is None or switch[1] != "true":
        version = _version(said) or CONTAINERD
        table = "io.containerd.cri.v1.runtime" if version >= (2, 0, 0) else "io.containerd.grpc.v1.cri"
        hint = f"{config}: enable_cdi = true below [plugins.'{table}'], then restart containerd"
        unsaid = config if version < (2, 0, 0) and not os.path.lexists(config) else None
        return found._replace(problem="enable_cdi is off", hint=hint, unsaid=unsaid)
    folders = _DIRS.search(dump)
    found = found._replace(folders=tuple(_QUOTED.findall(folders[1])) if folders else FOLDERS)
    return _looking(found, f"{config}: cdi_spec_dirs")


def _crio(configs: Iterable[Path] | None = None) -> Runtime | None:
    said = _says("crio", "--version")
    if said is None:
        return None
    found = _judged("CRI-O", said, CRIO)
    folders = FOLDERS
    for place in configs or CRIO_CONFIGS:
        for path in sorted(place.iterdir()) if place.is_dir() else [place]:
            told = _DIRS.findall(_text(path) or "")
            folders = tuple(_QUOTED.findall(told[-1])) if told else folders
    return found if found.problem else _looking(found._replace(folders=folders), "cdi_spec_dirs in /etc/crio")


def _judged(name: str, said: str, least: Version) -> Runtime:
    """A runtime by what it says of its version."""
    version = _version(said)
    if version is None:
        return Runtime(name, "", "it does not say which version it is", f"{name} has to be {_dotted(least)} or newer")
    text = _dotted(version)
    if version < least:
        return Runtime(name, text, f"{text} knows no CDI", f"{name} from {_dotted(least)} on")
    return Runtime(name, text)


def _looking(found: Runtime, where: str) -> Runtime:
    """The same, with what is wrong where it does not look into the folder of our spec."""
    if FOLDERS[0] in found.folders:
        return found
    problem = f"it does not look into {FOLDERS[0]}"
    return found._replace(problem=problem, hint=f"add {FOLDERS[0]} to {where}, or: limosa cdi --output FILE")


def _says(name: str, *arguments: str) -> str | None:
    """What a runtime's program prints; None where there is none, "" where it fails."""
    program = start.program(name)
    if program is None:
        return None
    try:
        ran = start.run([program, *arguments], capture_output=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return ran.stdout[:MOST_BYTES].decode(errors="replace") if ran.returncode == 0 else ""


def _version(said: str) -> Version | None:
    found = _VERSION.search(said)
    return (int(found[1]), int(found[2]), int(found[3] or 0)) if found else None


def _dotted(version: Version) -> str:
    return ".".join(map(str, version))


def _text(path: Path) -> str | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        with open(fd, encoding="utf-8", errors="replace") as file:
            return file.read(MOST_BYTES)
    except OSError:
        return None
