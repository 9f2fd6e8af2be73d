"""What NVML says that forbids an operation: a table over inventories, and the same through ``plan`` on real processes.

The machine is made up in the form that NVML's answers have here: two H200 and a GPU of another chip, driver 580.159.04.
What differs from it is said in each row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from driver_double import GB, DriverDouble

from limosa import operation
from limosa.errors import Reason, Refused, UsageError
from limosa.gpu import Gpu, GpuProcess, Inventory
from limosa.operation.journal import Member
from limosa.operation.refusals import PEER_BYTES, gpu_refusals, same_chip
from limosa.operation.rules import apply_force
from limosa.process.identity import Identity

GpuLike = Callable[..., int]

A, B, C = (f"GPU-{n}c4a5f8e-0d2b-4c55-9a3f-6f1f0a3b7d10" for n in "012")

MACHINE = b"""{"driver_version": "580.159.04", "cuda_version": "13.0", "gpus": [
 {"index": 0, "uuid": "%s", "name": "NVIDIA H200", "memory_total": 150754820096, "memory_used": 0,
  "memory_free": 150109880320, "minor": 0, "pci_bus_id": "00000000:19:00.0", "persistence": true},
 {"index": 1, "uuid": "%s", "name": "NVIDIA H200", "memory_total": 150754820096, "memory_used": 0,
  "memory_free": 150109880320, "minor": 1, "pci_bus_id": "00000000:3b:00.0", "persistence": true},
 {"index": 2, "uuid": "%s", "name": "NVIDIA L40S", "memory_total": 48305799168, "memory_used": 0,
  "memory_free": 47697166336, "minor": 2, "pci_bus_id": "00000000:4c:00.0", "persistence": true}]}""" % (
    A.encode(),
    B.encode(),
    C.encode(),
)


def machine(*, mig: Sequence[int] = (), **fields: Any) -> Inventory:
    """The machine, with these GPUs in MIG mode and these fields changed."""
    found = msgspec.json.decode(MACHINE, type=Inventory)
    gpus = [msgspec.structs.replace(g, mig=g.index in mig) for g in found.gpus]
    return msgspec.structs.replace(found, gpus=gpus, **fields)


def member(
    held: dict[str, int], goes: dict[str, str] | None = None, *, was: str = "running", pid: int = 4711
) -> Member:
    """A process that can open the two H200, holds that much and goes there."""
    home = {A: A, B: B}
    return Member(identity=Identity(pid, 1), was=was, home=home, map={**home, **(goes or {})}, held=held, root=pid)


def found(inventory: Inventory, *members: Member, moves: bool = False) -> list[tuple[str, int, bool]]:
    """(id, exit code, whether it can be forced) of each reason, in order."""
    return [(r.id, r.exit_code, r.forceable) for r in gpu_refusals(inventory, members, moves=moves)]


SMALL = {A: 4 * GB}
SWAPPED = {A: B, B: A}
OLD, MIG, MPS, CHIP = ("driver-too-old", 12, False), ("mig", 12, False), ("mps-server", 12, True), ("chip", 12, False)
PEERS = ("peer-access", 13, True)


def test_nothing_stands_against_a_plain_job() -> None:
    assert found(machine(), member(SMALL)) == []
    assert found(machine(), member(SMALL, SWAPPED), moves=True) == []
    assert found(machine()) == []


@pytest.mark.parametrize(
    ("version", "suspend", "move"),
    [
        ("550.163.01", [OLD], [OLD]),
        ("569.99", [OLD], [OLD]),
        ("570.00", [], [OLD]),
        ("575.57.08", [], [OLD]),
        ("579.99", [], [OLD]),
        ("580.0", [], []),
        ("580.159.04", [], []),
        ("610.10", [], []),
        ("unreadable", [OLD], [OLD]),
    ],
)
def test_the_driver_has_to_be_570_to_suspend_and_580_to_change_gpus(
    version: str, suspend: list[Any], move: list[Any]
) -> None:
    inventory = machine(driver_version=version)
    assert found(inventory, member(SMALL), moves=False) == suspend
    assert found(inventory, member(SMALL, SWAPPED), moves=True) == move


def test_what_is_said_of_an_old_driver_names_both_versions() -> None:
    (reason,) = gpu_refusals(machine(driver_version="575.57.08"), [member(SMALL, SWAPPED)], moves=True)
    assert "575.57.08" in reason.text
    assert "580" in reason.text
    assert reason.hint


@pytest.mark.parametrize(
    ("mig", "held", "goes", "refused"),
    [
        ([0], SMALL, {}, [MIG]),  # where it is
        ([1], SMALL, SWAPPED, [MIG]),  # where it goes
        ([0, 1], SMALL, SWAPPED, [MIG, MIG]),
        ([1], SMALL, {}, []),  # a GPU on which it holds nothing
        ([2], SMALL, SWAPPED, []),
        ([0], {}, {}, []),
    ],
)
def test_a_gpu_in_mig_mode_that_the_job_is_on_or_goes_to(
    mig: list[int], held: dict[str, int], goes: dict[str, str], refused: list[Any]
) -> None:
    assert found(machine(mig=mig), member(held, goes), moves=bool(goes)) == refused


def test_each_gpu_in_mig_mode_is_named_once_however_many_processes_are_on_it() -> None:
    reasons = gpu_refusals(machine(mig=[0]), [member(SMALL), member(SMALL, pid=4712)], moves=False)
    assert [r.text for r in reasons] == ["GPU 0 is in MIG mode, which the driver cannot checkpoint"]


def test_a_client_of_mps_is_named_by_nvml() -> None:
    plain, client = member(SMALL), member(SMALL, pid=4712)
    inventory = machine()
    inventory.gpus[0].mps_processes.append(GpuProcess(pid=4712, memory_used=4 * GB))
    assert gpu_refusals(inventory, [plain], moves=False) == []
    (reason,) = gpu_refusals(inventory, [plain, client], moves=False)
    assert (reason.id, reason.exit_code, reason.forceable, reason.pid) == ("mps", 12, True, 4712)


def test_an_mps_server_refuses_and_can_be_forced() -> None:
    assert found(machine(mps=True), member(SMALL)) == [MPS]
    reasons = gpu_refusals(machine(mps=True), [member(SMALL)], moves=False)
    assert not any(r.refuses for r in apply_force(reasons, ["mps-server"]))


@pytest.mark.parametrize(
    ("held", "goes", "refused"),
    [
        (SMALL, {A: C}, [CHIP]),
        (SMALL, {B: C}, []),  # on the GPU that becomes another chip it holds nothing
        (SMALL, {C: A}, []),
        (SMALL, SWAPPED, []),
        ({A: GB, B: GB // 4}, {A: B, B: C}, [CHIP]),
    ],
)
def test_another_chip_is_refused_where_something_is_held(
    held: dict[str, int], goes: dict[str, str], refused: list[Any]
) -> None:
    got = [r for r in found(machine(), member(held, goes), moves=True) if r != PEERS]
    assert got == refused


def test_of_another_chip_both_gpus_and_the_process_are_named() -> None:
    (reason,) = gpu_refusals(machine(), [member(SMALL, {A: C})], moves=True)
    assert reason.pid == 4711
    assert all(word in reason.text for word in ("GPU 0", "NVIDIA H200", "GPU 2", "NVIDIA L40S"))


def test_the_same_name_with_another_memory_size_is_another_chip() -> None:
    h200 = machine().gpus[0]
    half = msgspec.structs.replace(h200, memory_total=h200.memory_total // 2)
    assert same_chip(h200, machine().gpus[1])
    assert not same_chip(h200, half)
    inventory = machine()
    inventory.gpus[1] = msgspec.structs.replace(half, index=1, uuid=B)
    assert found(inventory, member(SMALL, SWAPPED), moves=True) == [CHIP]


@pytest.mark.parametrize(
    ("held", "was", "refused"),
    [
        ({A: PEER_BYTES, B: GB // 2}, "running", [PEERS]),
        ({A: GB // 2, B: 80 * GB}, "locked", [PEERS]),
        ({A: PEER_BYTES - 1, B: PEER_BYTES - 1}, "running", []),
        ({A: 80 * GB}, "running", []),  # one GPU
        ({A: 80 * GB, B: 80 * GB}, "checkpointed", []),  # too late to refuse: it can only be restored
        ({}, "running", []),
    ],
)
def test_much_memory_on_several_gpus(held: dict[str, int], was: str, refused: list[Any]) -> None:
    assert found(machine(), member(held, was=was)) == refused


def test_peer_access_can_be_forced_and_says_when_that_is_right() -> None:
    reasons = gpu_refusals(machine(), [member({A: 8 * GB, B: 8 * GB})], moves=False)
    assert "--force=peer-access" in reasons[0].hint
    assert [r.refuses for r in apply_force(reasons, {"peer-access"})] == [False]


@pytest.mark.parametrize("forced", ["mig", "chip", "driver-too-old"])
def test_what_the_driver_cannot_do_cannot_be_forced(forced: str) -> None:
    inventory = machine(mig=[0], driver_version="560.1")
    reasons: list[Reason] = gpu_refusals(inventory, [member(SMALL, {A: C})], moves=True)
    assert {r.id for r in reasons} == {"mig", "chip", "driver-too-old"}
    with pytest.raises(UsageError, match="cannot be forced"):
        apply_force(reasons, [forced])


# --- through the verbs ----------------------------------------------------------------------------------------


def seen(double: DriverDouble, monkeypatch: pytest.MonkeyPatch, *, mig: Sequence[int] = (), **fields: Any) -> None:
    """From here on NVML says this beside what the double says."""
    plain = double.inventory

    def inventory() -> Inventory:
        now = plain()
        gpus: list[Gpu] = [msgspec.structs.replace(g, mig=g.index in mig) for g in now.gpus]
        return msgspec.structs.replace(now, gpus=gpus, **fields)

    monkeypatch.setattr("limosa.gpu.inventory", inventory)
    monkeypatch.setattr(double, "inventory", inventory)


@pytest.mark.parametrize(
    ("change", "verb", "options", "refused"),
    [
        ({"mig": [0]}, "suspend", {}, "mig"),
        ({"mig": [1]}, "move", {"to": "1"}, "mig"),
        ({"mps": True}, "suspend", {}, "mps-server"),
        ({"driver_version": "569.1"}, "suspend", {}, "driver-too-old"),
        ({"driver_version": "575.57.08"}, "move", {"to": "1"}, "driver-too-old"),
    ],
)
def test_the_verb_refuses_before_it_touches_anything(
    gpu_like: GpuLike,
    double: DriverDouble,
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, Any],
    verb: str,
    options: dict[str, Any],
    refused: str,
) -> None:
    pid = gpu_like(on=0)
    seen(double, monkeypatch, **change)
    plan = operation.plan(verb, pid, **options)
    assert plan.verdict == "refused"
    assert refused in {r.id for r in plan.reasons if r.refuses}
    with pytest.raises(Refused) as caught:
        getattr(operation, verb)(pid, **options)
    assert caught.value.exit_code == 12
    assert double.calls == []
    assert double.states[pid] == "running"


def test_a_driver_that_cannot_change_gpus_still_suspends(
    gpu_like: GpuLike, double: DriverDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = gpu_like(on=0)
    seen(double, monkeypatch, driver_version="575.57.08")
    assert operation.plan("suspend", pid).verdict == "ok"


def test_a_forced_mps_server_is_a_warning_and_the_job_moves(
    gpu_like: GpuLike, double: DriverDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = gpu_like(on=0)
    seen(double, monkeypatch, mps=True)
    (outcome,) = operation.move(pid, to="1", force=["mps-server"])
    assert outcome.result is not None
    assert "mps-server" in {r.id for r in outcome.result.warnings}
    assert double.where(pid) == [1]


def test_a_process_on_two_gpus_with_much_on_one_is_refused(gpu_like: GpuLike, double: DriverDouble) -> None:
    pid = gpu_like(on=0, size=2 * GB)
    double.held[pid][double.uuids[1]] = GB // 2
    plan = operation.plan("suspend", pid)
    assert [(r.id, r.exit_code, r.pid) for r in plan.reasons if r.refuses] == [("peer-access", 13, pid)]
    assert operation.plan("suspend", pid, force=["peer-access"]).verdict == "ok"


def test_what_a_process_holds_is_read_from_the_inventory() -> None:
    inventory = machine()
    inventory.gpus[1] = msgspec.structs.replace(inventory.gpus[1], processes=[GpuProcess(pid=4711, memory_used=GB)])
    assert inventory.held({4711}) == {B: GB}
