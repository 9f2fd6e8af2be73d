"""What the campaign runs on: a software node (faults of the driver are rules in its folder), real GPUs, or neither."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from campaign.helpers import helper_pids
from campaign.processes import REAL

ROOM = "LIMOSA_CAMPAIGN_ROOM"
"""What the cgroups of a room's containers are called after."""
KIND_VMM = 3  # of cuMemCreate (limosa_softgpu/native/node.h)


class Ground:
    """A machine without GPUs: only jobs that CRIU alone moves."""

    name = "host"
    gpus = 0

    def arm(self, rules: list[str]) -> None:
        """Lets these rules hold (``limosa_softgpu/native/fault.h``)."""
        assert not rules, "there is no driver here that can be told to fail"

    def disarm(self) -> None:
        """No rule holds any more, and whoever hangs goes on."""

    def leftovers(self) -> dict[str, Any]:
        """What of the node must be the same before and after."""
        return {}

    def wait_for_memory(self, limit: float = 2.0) -> None:
        """Until nothing is held by processes that have ended: a kernel takes a while to take all of one apart."""

    def sweep(self) -> None:
        """After a failure that has been told: what one case has left is not held against the next."""


class Real(Ground):
    """Real GPUs: the driver is not made to fail."""

    name = "real"

    def __init__(self) -> None:
        from limosa import gpu

        self.gpus = len(gpu.inventory().gpus)

    def leftovers(self) -> dict[str, Any]:
        return {"requests": []}  # the driver's are not seen


class Soft(Ground):
    """A software node, in which this process runs."""

    name = "soft"

    def __init__(self) -> None:
        from limosa_softgpu.faults import Switches
        from limosa_softgpu.state import NODE_FOLDER, opened

        self.folder = Path(NODE_FOLDER)
        self.switches = Switches()
        with opened() as state:
            self.gpus = int(state.n_gpus)
        self._armed = False
        self._filled: list[Any] = []
        self._logged = 0

    def arm(self, rules: list[str]) -> None:
        self._logged = self._log_size()
        for rule in rules:
            self.switches.add(rule)
        self._armed = bool(rules)

    def count_calls(self, rule: str) -> str:
        """Has calls counted by a rule that does nothing to them; the rule's name."""
        self._armed = True
        return self.switches.add(rule)

    def disarm(self) -> None:
        if self._armed:
            self.switches.clear()
            self._armed = False
            for path in (self.folder / "requests").glob("restored-*"):  # who could hang the node if he were killed
                path.unlink(missing_ok=True)
        for filled in self._filled:
            filled.close()
        self._filled.clear()
        for number in range(self.gpus):
            self.switches.lose(number, False)

    def fill(self, gpus: list[int]) -> None:
        """Somebody takes all that is free on these GPUs, until ``disarm``."""
        for number in gpus:
            self._filled.append(self.switches.fill(number))

    def has_fired(self) -> bool:
        """Whether a rule has had its turn since they were armed."""
        with open(self.folder / "log", "rb") as file:
            file.seek(self._logged)
            told = b" " + file.read()
            return b" fault " in told or b" hazard " in told

    def wait_for_memory(self, limit: float = 2.0) -> None:
        from limosa import gpu
        from limosa_softgpu.state import opened

        end = time.monotonic() + limit
        while time.monotonic() < end:
            gpu.inventory()  # which looks what nobody holds any more
            with opened() as state:
                makers = {state.blocks[i].pid for i in range(state.n_blocks) if state.blocks[i].id}
            if all(os.path.exists(f"/proc/{pid}") for pid in makers):
                return
            time.sleep(0.01)

    def sweep(self) -> None:
        for path in (self.folder / "requests").iterdir():
            path.unlink(missing_ok=True)

    def _movers(self) -> dict[int, int]:
        """Contexts of a mover, which stays: bytes by block. What it has made for a job is not its own."""
        from limosa_softgpu.state import opened

        mover = helper_pids().get("mover", -1)
        with opened() as state:
            blocks = [block for block in state.blocks[: state.n_blocks] if block.id]  # 0: a free place
            return {int(b.id): int(b.bytes) for b in blocks if b.pid == mover and b.kind != KIND_VMM}

    def _log_size(self) -> int:
        return os.stat(self.folder / "log").st_size if (self.folder / "log").exists() else 0

    def leftovers(self) -> dict[str, Any]:
        from limosa import gpu

        its = self._movers()
        return {
            "used": sum(g.memory_used for g in gpu.inventory().gpus) - sum(its.values()),
            "blocks of device memory": len({int(name) for name in os.listdir(self.folder / "memory")} - its.keys()),
            "requests": sorted(os.listdir(self.folder / "requests")),
        }


def clear_cgroups(token: str) -> None:
    """Takes away what a room that was killed has left of its containers' cgroups."""
    from containers.runtimes import clear_cgroups as clear

    clear(f"/limosa-test-{token}")
    clear(f"/limosa-room-{token}")


def here() -> Ground:
    """The ground that this process stands on."""
    if REAL:
        return Real()
    from limosa_softgpu.state import NODE_FOLDER

    if os.path.exists(f"{NODE_FOLDER}/state"):
        return Soft()
    return Ground()
