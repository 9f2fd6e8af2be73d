"""What counts as room: the margin, and who can do without."""

from __future__ import annotations

from limosa.gpu import Gpu, Inventory
from limosa.gpu.gpus import GpuProcess
from limosa.operation import room
from limosa.operation.journal import Member
from limosa.process.identity import Identity

A, B = "GPU-a0000000-0000-0000-0000-000000000000", "GPU-b0000000-0000-0000-0000-000000000000"
MIB = 1 << 20
HELD = 1000 * MIB


def machine(free: int, *pids: int, used: int = 4 * MIB) -> Inventory:
    """Two GPUs with so much free; processes with these pids on the first."""
    on = [GpuProcess(pid, MIB) for pid in pids]
    gpus = [
        Gpu(index=i, uuid=u, name="NVIDIA H200", memory_total=4 * HELD, memory_used=used, memory_free=free, processes=p)
        for i, (u, p) in enumerate(((A, on), (B, [])))
    ]
    return Inventory(driver_version="580.159.04", cuda_version="13.0", gpus=gpus)


def job(**map_: str) -> Member:
    """A suspended process that held memory on the first GPU."""
    full = {A: A, B: B} | {{"a": A, "b": B}[k]: {"a": A, "b": B}[v] for k, v in map_.items()}
    return Member(identity=Identity(7, 1), was="checkpointed", home={A: A, B: B}, map=full, held={A: HELD})


def short(inventory: Inventory, member: Member) -> str:
    return room.shortage(inventory, [member], "none")


def test_a_job_that_fills_its_gpu_comes_back_to_it() -> None:
    assert not short(machine(HELD), job())
    assert not short(machine(HELD, 7), job()), "it is told itself, as long as it runs"


def test_less_than_it_held_is_never_enough() -> None:
    assert "GPU 0 has" in short(machine(HELD - 1), job())


def test_beside_others_it_needs_the_margin() -> None:
    assert "GPU 0 has" in short(machine(HELD, 8), job())
    assert "GPU 0 has" in short(machine(HELD, 0), job()), "somebody in another pid namespace"
    assert "GPU 0 has" in short(machine(HELD, used=room.MARGIN), job()), "nobody is named, and it is not idle"
    assert not short(machine(HELD + room.MARGIN, 8), job())


def test_the_margin_is_told() -> None:
    assert short(machine(HELD - MIB), job()) == "GPU 0 has 999 MiB free and 1000 MiB are needed"
    text = "GPU 0 has 1000 MiB free and 1.04 GiB are needed (64 MiB of it to spare)"
    assert short(machine(HELD, 8), job()) == text
    pair = room.shortage(machine(HELD, 8), [job(), job()], "none")
    assert pair == "GPU 0 has 1000 MiB free and 2.08 GiB are needed (64 MiB of it for each of 2 processes to spare)"


def test_on_another_gpu_it_needs_the_margin() -> None:
    there = job(a="b", b="a")
    assert "GPU 1 has" in short(machine(HELD), there)
    assert not short(machine(HELD + room.MARGIN), there)
