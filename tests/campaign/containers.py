"""The cases of containers: what befalls any job, its runtime's programs killed, and what their users do meanwhile.

The runtime's program (podman, runc), the runc below podman, the CRIU that was lent to it and the container's monitor
(conmon) are killed, alone and with ``limosa``, also in the middle of what they write or make. Somebody pauses, stops,
removes or restarts the container. Steps come from ``containers.json``, which
``python -m campaign --way containers --record`` writes.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from campaign import parked
from campaign.shapes import SHAPES

if TYPE_CHECKING:
    from campaign.cases import Case
    from campaign.controller import Disturber
    from campaign.room import Room

STEPS = Path(__file__).with_name("containers.json")
VICTIMS = tuple(name for name, shape in SHAPES.items() if shape.box)

BROKEN = {
    "recover-boxed-move": ("move", "before note restore begin"),
    "recover-exchanged": ("move", "after add of devices"),
    "recover-boxed-suspend": ("suspend", "after note lock done"),
    "recover-frozen": ("checkpoint", "after freeze"),
    "recover-writing": ("checkpoint", "during checkpoint"),
    "recover-boxed-dump": ("checkpoint", "before note post-dump done"),
    "recover-ending": ("checkpoint", "after start of the end"),
    "recover-left-frozen": ("leave-running", "before thaw"),
    "recover-making": ("restore", "during restore"),
    "recover-made": ("restore", "before note criu-restore done"),
    "recover-prepared": ("restore", "after ask of Snapshots Prepare"),
    "recover-created": ("restore", "after ask of Tasks Create"),
    "recover-started": ("restore", "after ask of Tasks Start"),
    "recover-deleting": ("checkpoint", "before ask of Tasks Delete"),
    "recover-its-devices": ("restore-to", "before leave of devices"),
}
"""What is left for ``recover``: the operation, and where it and its worker were killed."""

HOLDING = ("recover-there", "recover-aside", "recover-kept", "recover-back")
"""Of the broken ones of the parked way (``parked.py``), those of a container with the shim."""
HELPERS = ("kill-vault", "kill-mover", "kill-vault-mover", "kill-mover-both", "kill-vault-both", "vault-nofile")
CALLS_FAIL = ("result-2", "hang-for-good", "crash-caller")
"""How a call of the mover's, or of the shim's, fails: in more ways in ``parked.py``."""

WITH_RUNTIME = ("checkpoint", "leave-running", "restore", "restore-to")
BY_PROGRAM = ("recover-making", "recover-ending")
BY_SOCKET = ("recover-prepared", "recover-created", "recover-started", "recover-deleting")
"""Where a program of the runtime's is at work, or containerd is asked."""
OPERATIONS = ("move", "suspend", "resume", "resume-to", *WITH_RUNTIME, "clone", *BROKEN)

ASKED = (
    *("Containers Create", "Containers Delete", "Diff Apply", "Snapshots Prepare", "Snapshots Remove"),
    *("Tasks Create", "Tasks Delete", "Tasks Start"),
)
"""What containerd is asked for that changes something."""
VERBS = {"checkpoint": "checkpoint", "restore": "restore", "rename": "rename", "rm": "the end", "delete": "the end"}
"""What a runtime's program is told, and what its points are called."""
TICKS = (0, 1, 3, 7, 15, 30)
"""Of the moments in the middle of a runtime's run, of which it depends on the machine how many there are."""
WHO = ("runtime", "oci", "criu", "runtime-oci-criu")
ACTS = ("paused", "stopped", "removed", "restarted")
AT_POINTS = ("kill-limosa", "kill-worker", "kill-both", "sigint", "sigterm", "sigint-twice", "job-killed")
WITH_ACTS = (*ACTS, *(f"{act}+kill-both" for act in ACTS))
BEFALL = (*ACTS, "daemon-killed")
DEADLY = ("stopped", "removed", "restarted", "criu", "monitor")
"""Faults that end the job, or may: CRIU that is killed may have its own code in it (docs/caveats.md)."""
IN_THE_WAY = ("paused", "removed", "stopped", "restarted", "daemon-killed")
"""Faults that may keep an undo from coming to its end."""

DRIVER = (
    *(f"result-{code}" for code in (1, 304, 600, 999)),
    *("after-999", "hang", "hang-for-good", "delay", "slow", "crash-caller", "crash-target", "lost-here", "lost-there"),
)


def enumerate_all(known: dict[str, Any]) -> Iterator[Case]:
    """Every case of containers."""
    from campaign.cases import Case

    for operation, victim, steps in parked.kinds(known, (*OPERATIONS, *HOLDING), VICTIMS, possible):
        kinds = [_points(operation, victim, steps), parked.disk(steps), _whole(operation, victim)]
        if SHAPES[victim].shim:
            kinds += [parked.driver(steps), _held(operation, steps), parked.calls(victim, steps, CALLS_FAIL)]
        else:
            kinds.append(_driver(steps))
        for step, fault in itertools.chain(*kinds):
            yield Case(operation, victim, step, fault)


def possible(operation: str, victim: str) -> bool:
    """Whether an operation can be done to that class of victim."""
    if operation in (BY_PROGRAM if SHAPES[victim].box == "containerd" else BY_SOCKET):
        return False
    return operation in OPERATIONS or SHAPES[victim].shim


def _held(operation: str, steps: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Vault and mover of the machine are killed, or may open no more files, while they have what is the container's."""
    from campaign.cases import dashed

    for name, n, living in steps["points"]:
        if name.startswith("during"):
            continue
        for fault in HELPERS:
            if operation.startswith("recover") and "vault-mover" in fault:
                continue  # limosa has been killed before: nobody else has the memory
            if all(one in living or one in ("kill", "both") for one in parked.doomed(fault)):
                yield f"point.{dashed(name)}.{n}", fault


def _points(operation: str, victim: str, steps: dict[str, Any]) -> Iterator[tuple[str, str]]:
    from campaign.cases import dashed

    begun, boxed = _begun(operation), SHAPES[victim].box
    there = not begun.startswith("restore")
    names = [(name, n, living) for name, n, living in steps["points"] if not name.startswith("during")]
    during = dict.fromkeys(name for name, _, _ in steps["points"] if name.startswith("during"))
    names += [(name, n, ["limosa", "worker", "runtime", "oci", "criu"]) for name in during for n in TICKS]
    for name, n, living in names:
        step = f"point.{dashed(name)}.{n}"
        faults = [fault for fault in AT_POINTS if there or fault != "job-killed"]
        if not operation.startswith("recover"):
            faults += WITH_ACTS if there else ()
        elif there:
            faults += ACTS
        for who in WHO:
            if set(who.split("-")) & set(living) and ("oci" not in who or boxed == "podman"):
                faults += [f"kill-{who}", f"kill-{who}-both"]
        if boxed in ("podman", "containerd") and there:
            faults.append("monitor-killed")
        if boxed == "containerd":
            faults += ["daemon-killed", "daemon-killed+kill-both"]
        for fault in faults:
            if "kill-worker" in fault and "worker" not in living:
                continue
            # podman restart beside podman rm: it says that it has, and podman has forgotten what runs (6 of 25, 4.3.1).
            if (boxed, name) == ("podman", "during the end") and fault.startswith("restarted"):
                continue
            yield step, fault


def _begun(operation: str) -> str:
    return (BROKEN | parked.BROKEN).get(operation, (operation,))[0]


def _driver(steps: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for call in ("state", "lock", "checkpoint", "restore", "unlock"):
        for n in range(steps["calls"].count(call)):
            for fault in DRIVER if call != "state" else ("result-3", "result-999", "state-1", "hang", "delay"):
                yield f"call.{call}.{n}", fault


def _whole(operation: str, victim: str) -> Iterator[tuple[str, str]]:
    begun, boxed = _begun(operation), SHAPES[victim].box
    there = not begun.startswith("restore")
    faults = ["none", *(f"random-kill-{who}.{n}" for who in ("limosa", "worker", "both") for n in range(3))]
    faults += [f"random-{name}.{n}" for name in ("sigint", "sigterm") for n in range(2)]
    faults += ["full-runtime", *(f"limosa-nofile.{n}" for n in range(3))]
    if there:
        faults += [f"random-{act}.{n}" for act in ACTS for n in range(4)]
    if boxed == "containerd":
        faults += [f"random-daemon-killed.{n}" for n in range(4)]
    if begun in WITH_RUNTIME:
        programs = ("runtime", "criu") if boxed != "podman" else ("runtime", "oci", "criu")
        faults += [f"random-kill-{who}.{n}" for who in programs for n in range(4)]
    if not operation.startswith("recover"):
        faults += [f"timeout.{n}" for n in range(6)]
    if operation in ("checkpoint", "leave-running"):
        faults += ["full-disk.0", "full-disk.1", "file-size"]
    if operation in ("move", "suspend", "checkpoint"):
        faults.append("busy-target")
    for fault in faults:
        yield "run", fault


# --- in the controller ----------------------------------------------------------------------------------------


def watch(disturber: Disturber) -> None:
    """Makes points of what a runtime's program does, and of what is done to a container."""
    from limosa.containers import calls, containerd_api, devices
    from limosa.operation import container_gpus, recover_containers
    from limosa.operation.steps import container_dump

    real: Callable[..., Any] = calls.call

    def call(argv: Any, *args: Any, on_start: Any = None, tick: Any = lambda: None, **options: Any) -> Any:
        label = next((VERBS[word] for word in argv[1:] if word in VERBS), "")
        if not label:
            return real(argv, *args, **options)

        def started(who: Any) -> None:
            disturber.at(f"before start of {label}")
            if on_start is not None:
                on_start(who)
            disturber.at(f"after start of {label}")
            disturber.runtime = who.pid

        def ticked() -> None:
            disturber.at(f"during {label}")
            tick()

        disturber.at(f"before call of {label}")
        try:
            result = real(argv, *args, on_start=started, tick=ticked, **options)
        finally:
            disturber.runtime = 0
        disturber.at(f"after call of {label}")
        return result

    calls.call = call
    for module in (container_dump, recover_containers):
        for name in ("freeze", "thaw"):
            if hasattr(module, name):
                disturber.around(module, name, lambda *_, _name=name: _name)
    disturber.around(containerd_api.Api, "ask", lambda _, method, *__, **___: _asked(method))
    for name in ("add", "leave"):
        disturber.around(devices, name, lambda *_, _name=name, **__: f"{_name} of devices")
    assert container_gpus.devices is devices


def _asked(method: str) -> str:
    """What a call of containerd's is called, if it is a point."""
    name = method.rpartition(".")[2].replace("/", " ")
    return f"ask of {name}" if name in ASKED else ""


def at_work(runtime: int) -> dict[str, int]:
    """The programs of a runtime that is at work, by what a fault calls them."""
    from limosa.containers.calls import session_of

    found: dict[str, int] = {}
    for pid in session_of(runtime):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if b"swrk" in words:
                found.setdefault("criu", pid)
            elif pid == runtime:
                found["runtime"] = pid
            elif os.path.basename(words[0]) == b"runc":
                found.setdefault("oci", pid)
    return found


# --- in the room ----------------------------------------------------------------------------------------------


def strike(room: Room, who: str) -> bool:
    """Kills programs of a runtime that limosa has started; whether any of them was at work."""
    from campaign.processes import send_signal
    from limosa.process.tree import descendants, snapshot

    doomed = []
    for pid in descendants(room.controller_pid, snapshot()):
        with contextlib.suppress(OSError):
            program = os.path.basename(Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0])
            if os.getsid(pid) == pid and program in (b"podman", b"runc"):
                doomed += [one for name, one in at_work(pid).items() if name in who.split("-")]
    for pid in doomed:
        send_signal(pid, signal.SIGKILL)
    return bool(doomed)
