"""The demo on a machine without a GPU: it goes on as a program of a node of two software GPUs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NoReturn

from limosa import start
from limosa.errors import LimosaError
from limosa.process.candidates import is_own
from limosa.process.identity import Handle, Identity

WHY = "LIMOSA_DEMO_WHY"
"""Says to the demo in the node why it is there: what the machine lacks."""

_SCREEN = ("COLUMNS", "FORCE_COLOR", "NO_COLOR", "TERM")
_GPUS, _MEMORY = 2, 1 << 30
_END_SECONDS = 10.0


def why_here() -> str:
    """Why the demo was put on a node, in words; "" where whoever started it did that."""
    return os.environ.get(WHY, "")


def go_on_in_a_node(no_gpus: str, arguments: Sequence[str]) -> str:
    """Makes this process the first one of a node and starts the demo anew there; returns only where that cannot be.

    Args:
        no_gpus: why there is no GPU to show it on.
        arguments: the demo's own.

    Returns:
        Why there is no node.
    """
    from limosa_softgpu import node
    from limosa_softgpu.spec import make_spec

    if WHY in os.environ:
        return f"there is a node of software GPUs and no GPU on it: {no_gpus}"
    try:
        node.enter(make_spec(_GPUS, [_MEMORY], ["H200"]))
    except LimosaError as error:
        return f"{no_gpus}; {error.message}" + (f" ({error.hint})" if error.hint else "")
    shown = {name: os.environ[name] for name in _SCREEN if name in os.environ}
    os.chdir(start.FOLDER)
    node.run_here(start.python("limosa.demo.node", *arguments), start.environment({**shown, WHY: no_gpus}))
    raise AssertionError("unreachable")


def end_helpers() -> None:
    """End Limosa's own processes in the demo's node, mover, vault and worker: they would keep it for minutes.

    Each is told until it has ended, which it does as soon as nobody needs it: a worker that still works does not hear
    it, and a job that somebody has brought into the node meanwhile keeps what it has.
    """
    until = time.monotonic() + _END_SECONDS
    while (left := list(_helpers())) and time.monotonic() < until:
        for one in left:
            with suppress(LimosaError, OSError), Handle(one) as handle:
                handle.signal(signal.SIGTERM)
        time.sleep(0.1)


def _helpers() -> Iterator[Identity]:
    """Limosa's own processes in the node that this process is in; those of others are none of the demo's."""
    here = os.readlink("/proc/self/ns/mnt")
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with suppress(LimosaError, OSError):
            one = Identity.of(pid)
            if os.readlink(f"/proc/{pid}/ns/mnt") == here and is_own(pid):
                yield one


def main(argv: Sequence[str]) -> NoReturn:
    """The demo in the node."""
    from limosa.cli.main import entry

    entry(["demo", *argv])
