"""What goes wrong in a case, and how it is brought about: rules on the node, orders to the controller, signals."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from campaign import cases, containers, parked, ranks
from campaign.cases import Case
from campaign.disks import full_disk, small_disk
from campaign.ground import Soft
from campaign.hazards import HAZARDS, ONCE, RELEASED, Hazard, name_of
from campaign.helpers import helper_pids
from campaign.processes import send_signal

if TYPE_CHECKING:
    from campaign.room import Room

RELEASE = 1.2  # seconds after which a driver that hangs comes back, where it does

BROKEN = {
    "recover-move": ("move", "before note restore begin"),
    "recover-suspend": ("suspend", "after note lock done"),
    "recover-checkpoint": ("checkpoint", "before note post-dump done"),
    "recover-restore": ("restore", "before note criu-restore done"),
    **parked.BROKEN,
    **ranks.BROKEN,
    **containers.BROKEN,
}
"""What is left for ``recover``: the operation, and where it and its worker were killed."""


class Fault:
    """One case's fault.

    Attributes:
        fault: its name.
        operation: the operation, or the one that was killed for ``recover``.
        places: the GPUs that the job is on.
        undo: what takes away again what was put in the way.
        extra: more words for the command line.
    """

    def __init__(self, room: Room, case: Case):
        self.room, self.case, self.fault = room, case, case.fault
        self.operation = BROKEN.get(case.operation, (case.operation, ""))[0]
        self.places: list[int] = []
        self.undo: list[Callable[[], None]] = []
        self.extra: list[str] = []

    @property
    def kills_job(self) -> bool:
        """Whether the fault ends the job, or a process of it."""
        deadly = ("job-killed", "member-killed", "crash-target", "exit", "lost-")  # a GPU that is lost ends its jobs
        if self.hazard is not None and self.hazard.loses == "process":
            return True
        if ranks.starves(self.case.victim, self.fault):
            return True
        in_job = self.case.step.startswith(("job.", "nccl.")) and self.fault == "crash-caller"
        if self.case.boxed and any(word in self.fault for word in containers.DEADLY):
            return True
        return in_job or self.case.victim == "exits" or any(word in self.fault for word in deadly)

    @property
    def hazard(self) -> Hazard | None:
        """What the driver's hazard is, where it is one."""
        return HAZARDS[self.fault] if self.case.step == "hazard" else None

    @property
    def loses_job(self) -> bool:
        """Whether the driver will not take the job back, whoever asks it."""
        if self.hazard is not None:
            return self.hazard.loses == "job"
        claimed = self.case.step.startswith("inside.restore-claimed") and self.fault.startswith("result-")
        return claimed and (self.case.victim != "exits" or self.operation == "swap")  # the other one does not exit

    @property
    def for_good(self) -> bool:
        """Whether what fails goes on failing, so that an undo may fail as well."""
        if self.hazard is not None:
            return any(word in self.fault for word in ("for-good", "kill-after-", "needs-"))
        if self.case.boxed and any(word in self.fault for word in containers.IN_THE_WAY):
            return True
        words = ("for-good", "lost-", "full", "state-", "blind", "file-size", "nofile")
        return any(word in self.fault for word in words)

    def order(self) -> dict[str, Any]:
        """What the controller is told, and what is armed."""
        room, case, step, fault = self.room, self.case, self.case.step.split("."), self.fault
        order: dict[str, Any] = {"record": self.record, "parked": case.parked, "boxed": case.boxed}
        flag = room.base / "out" / "flag"
        flag.unlink(missing_ok=True)
        if room.random.random() < 0.1 or self.room.ground.name == "real":
            order["worker"] = "exec"
        at: list[dict[str, Any]] = []
        if self.record and case.parked:
            self.measure = self._measuring()
        names = {cases.dashed(name): name for name, _, _ in self.steps.get("points", [])}
        if step[0] == "point":
            point = {"name": names.get(step[1], step[1].replace("-", " ")), "n": int(step[2])}
            act, _, more = fault.partition("+")
            for one in filter(None, (act, more)):
                at.append({**point, **_deed(one, str(flag))})
        elif case.victim in cases.ACTS and self.steps.get("points") and self.operation not in ("restore", "restore-to"):
            at.append(self._middle(str(flag)))
        if step[0] == "call":
            room.ground.arm(self._driver_rules(step[1], int(step[2])))
        elif step[0] in ("mover", "job"):
            room.ground.arm([self._parked_rule(step[0], step[1], int(step[2]))])
        elif step[0] == "nccl":
            room.ground.arm([f"function={step[1]} nth={int(step[2]) + 1} {self._struck()}"])
        elif step[0] == "inside":
            room.ground.arm([f"function=step:{step[1]} nth={int(step[2]) + 1} {self._struck()}"])
        elif step[0] == "hazard" and not HAZARDS[fault].early:
            self.arm_hazard()
        elif step[0] == "nvml":
            room.ground.arm(self._nvml_rules(int(step[1])))
        elif step[0] == "disk":
            code = cases.ERRNO[fault.removesuffix("-for-good")]
            order["disk"] = {"call": step[1], "n": int(step[2]), "errno": code, "forever": fault.endswith("for-good")}
        order["at"] = at
        head, _, then = fault.partition("+")
        if head in ("hang", *RELEASED) or (step[0] == "hazard" and HAZARDS[fault].then):
            room.after(RELEASE, room.ground.disarm)
        if step[0] in ("inside", "hazard") and then:
            room.after(0.05, lambda: self._strike(f"random-{then}", fired=True))
        self._whole(order)
        return order

    def _struck(self) -> str:
        """What happens at a point in the middle of the driver's work."""
        kind = self.fault.partition("+")[0]
        words = {"hang-for-good": "hang", "delay": "delay=0.15", "slow": "delay=2.6", "crash-target": "crash=target"}
        words["crash-caller"] = "crash=caller"
        return words.get(kind, kind.replace("result-", "result="))

    def _measuring(self) -> dict[str, str]:
        """Rules that do nothing and count the calls of mover and job."""
        ground = self.room.ground
        assert isinstance(ground, Soft)
        callers = {"mover": "limosa-mover", "job": str(self.room.jobs["a"].cuda_pids[-1])}
        found = {
            f"{who}.{function}": ground.count_calls(f"function={function} caller={callers[who]} every=1 delay=0")
            for who, functions in (("mover", parked.MOVER), ("job", parked.JOB))
            for function in functions
        }
        if self.case.victim in ranks.VICTIMS:
            found |= {f"nccl.{name}": ground.count_calls(f"function={name} every=1 delay=0") for name in ranks.MADE}
        return found

    def arm_hazard(self) -> None:
        """Switches a hazard on; one that is lost once a process is poisoned befalls one process."""
        hazard = HAZARDS[self.fault]
        once = " nth=1" if name_of(self.fault) in ONCE else ""
        self.room.ground.arm([f"hazard={name_of(self.fault)}{once}", *hazard.rules])
        if self.fault == "kill-after-restore-hangs":
            self.room.kill_a_restored_one()

    def _middle(self, flag: str) -> dict[str, Any]:
        """A point in the middle of the operation, where a victim that behaves does so."""
        names = [(name, n) for name, n, _ in self.steps["points"] if name.startswith("before note")]
        name, n = names[len(names) // 3] if names else (self.steps["points"][0][0], 0)
        return {"name": name, "n": n, **_deed(cases.ACTS[self.case.victim], flag)}

    @property
    def steps(self) -> dict[str, Any]:
        """What was recorded of this operation and class of victim."""
        found: dict[str, Any] = self.room.known.get(f"{self.case.operation}/{self.case.victim}", {})
        return found

    def _driver_rules(self, call: str, n: int) -> list[str]:
        head = f"function={cases.CALLS[call]} nth={n + 1}"
        kind, _, value = self.fault.partition("-")
        if kind in ("result", "after", "state"):
            return [f"{head} {kind}={value}"]
        if self.fault in ("hang", "hang-for-good"):
            return [f"{head} hang"]
        if self.fault == "delay":
            return [f"{head} delay=0.15"]
        if self.fault == "slow":  # longer than what Limosa gives it
            return [f"{head} delay=2.6"]
        if kind == "crash":
            key = "crash-after" if self.fault.endswith("-after") else "crash"
            return [f"{head} {key}={'target' if 'target' in self.fault else 'caller'}"]
        if kind == "lost":
            half = max(1, self.room.ground.gpus // 2)
            here = self.places[0] if self.places else 0
            return [f"{head} lost={here if value == 'here' else (here + half) % self.room.ground.gpus}"]
        assert self.fault == "memory-host", self.fault
        return [f"{head} memory=host"]

    def _parked_rule(self, who: str, function: str, n: int) -> str:
        """A call that the mover makes, or the shim in the job, fails."""
        caller = "limosa-mover" if who == "mover" else str(self.room.jobs["a"].cuda_pids[-1])
        head = f"function={function} caller={caller} nth={n + 1}"
        kind, _, value = self.fault.partition("-")
        if kind in ("result", "after", "memory", "crash"):
            return f"{head} {kind}={value}"
        return f"{head} delay=0.15" if kind == "delay" else f"{head} hang"

    def _nvml_rules(self, n: int) -> list[str]:
        head = f"function={cases.NVML} nth={n + 1}"
        kind, _, value = self.fault.partition("-")
        if kind == "result":
            return [f"{head} result={value}"]
        if kind == "crash":
            return [f"{head} crash=caller"]
        if kind in ("hang", "delay"):
            return [f"{head} hang" if kind == "hang" else f"{head} delay=0.15"]
        gpus = self.room.ground.gpus
        if kind == "full":  # for one look at all GPUs
            return [f"function=nvmlDeviceGetMemoryInfo* nth={n * gpus + i + 1} lie=free:0" for i in range(gpus)]
        assert kind == "blind"
        return [
            f"function=nvmlDeviceGetComputeRunningProcesses* nth={n * gpus + i + 1} lie=processes:none"
            for i in range(gpus)
        ]

    def _whole(self, order: dict[str, Any]) -> None:
        """Faults of no step in particular."""
        room, (kind, _, number) = self.room, self.fault.partition(".")
        seconds = max(float(self.steps.get("seconds", 0.3)), 1.5 if room.ground.name == "real" else 0.0)
        if kind.startswith("random-"):
            moment = room.random.uniform(0, 1.1 * seconds)
            room.after(moment, lambda: self._strike(kind))
        elif kind == "timeout":
            self.extra = ["--timeout", f"{(int(number) + 0.5) / 4 * seconds:.3f}"]
        elif kind == "file-size":
            order["file_size"] = 1 << 16
        elif kind == "limosa-nofile":
            order["nofile"] = 3 << int(number)
        elif kind == "full-runtime":
            self.undo.append(full_disk(room.runtime))
        elif kind == "full-disk":
            self.undo.append(small_disk(room.base / "images", (64 << 10) << (8 * int(number))))
        elif kind == "busy-target":
            pass  # another limosa works on it already: see go()

    def _strike(self, kind: str, fired: bool = False) -> None:
        """Kills or signals, once limosa has begun; with ``fired`` once the driver is at what it was told to be at."""
        pid = self.room.controller_pid
        early = fired and isinstance(self.room.ground, Soft) and not self.room.ground.has_fired()
        if not pid or not self.room.began or early:  # not before it is what it says it is
            self.room.after(0.002, lambda: self._strike(kind, fired) if self.room.controller_pid else None)
            return
        if (what := kind.removeprefix("random-")) in containers.BEFALL:
            self.room.behave(what)
            return
        if kind in ("random-sigint", "random-sigterm"):
            send_signal(pid, signal.SIGINT if kind.endswith("int") else signal.SIGTERM)
            return
        who = kind.removeprefix("random-kill-")
        if self.case.boxed and who in containers.WHO:
            if not containers.strike(self.room, who):  # it is not at work yet
                self.room.after(0.004, lambda: self._strike(kind) if self.room.controller_pid else None)
            return
        for helper, doomed in helper_pids().items() if self.case.parked else ():
            if helper in who:
                send_signal(doomed, signal.SIGKILL)
        who = "both" if who.endswith("both") else who
        if who in ("worker", "both"):
            for stranger in self.room.strangers():
                with contextlib.suppress(OSError):
                    if Path(f"/proc/{stranger}/comm").read_text().startswith("limosa-worker"):
                        send_signal(stranger, signal.SIGKILL)
        if who in ("limosa", "both"):
            send_signal(pid, signal.SIGKILL)

    # -- the case ---------------------------------------------------------------------------------------------------


def _deed(fault: str, flag: str) -> dict[str, Any]:
    """What a controller does at a point."""
    who = {
        "kill-limosa": ["limosa"],
        "kill-worker": ["worker"],
        "kill-both": ["worker", "limosa"],
        "kill-criu": ["criu"],
        "kill-script": ["script"],
        "kill-all": ["criu", "worker", "limosa"],
        "kill-vault": ["vault"],
        "kill-mover": ["mover"],
        "kill-vault-mover": ["vault", "mover"],
        "kill-mover-both": ["mover", "worker", "limosa"],
        "kill-vault-both": ["vault", "worker", "limosa"],
        **{f"kill-{who}": who.split("-") for who in containers.WHO},
        **{f"kill-{who}-both": [*who.split("-"), "worker", "limosa"] for who in containers.WHO},
    }
    if fault in who:
        return {"do": "kill", "who": who[fault]}
    if fault.startswith("sig"):
        name, _, twice = fault.partition("-")
        return {"do": "signal", "signals": [name.upper()] * (2 if twice else 1)}
    return {"do": "victim", "what": {"job-killed": "killed"}.get(fault, fault), "flag": flag}
