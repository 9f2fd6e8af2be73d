"""What counts as room: the margin, and who can do without."""

from __future__ import annotations

import msgspec
import pytest

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


def test_limosas_own_processes_are_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "is_own", lambda pid: pid == 8)
    assert not short(machine(HELD, 8), job())
    assert "GPU 0 has" in short(machine(HELD, 8, 9), job())


def test_less_than_it_held_is_never_enough() -> None:
    assert "GPU 0 has" in short(machine(HELD - 1), job())


def test_at_home_beside_others_it_needs_little_more_than_it_held() -> None:
    assert "GPU 0 has" in short(machine(HELD, 8), job())
    assert "GPU 0 has" in short(machine(HELD, 0), job()), "somebody in another pid namespace"
    assert "GPU 0 has" in short(machine(HELD, used=room.MARGIN + MIB), job()), "nobody is named, and it is not idle"
    assert not short(machine(HELD + room.NEAR, 8), job())


def test_sizes_that_are_close_are_told_so_that_they_differ() -> None:
    assert short(machine(HELD - MIB), job()) == "GPU 0 has 999 MiB free and 1,000 MiB are needed"
    assert short(machine(HELD - 1), job()) == "GPU 0 has 999 MiB free and 1,000 MiB are needed"
    there = job(a="b", b="a")
    text = "GPU 1 has 1,000 MiB free and 1,064 MiB are needed (64 MiB of it to stay free)"
    assert short(machine(HELD), there) == text
    assert (
        short(machine(HELD // 2), there) == "GPU 1 has 500 MiB free and 1.04 GiB are needed (64 MiB of it to stay free)"
    )


def test_the_spare_is_once_a_gpu() -> None:
    pair = room.shortage(machine(HELD), [job(a="b", b="a")] * 2, "none")
    assert pair == "GPU 1 has 1000 MiB free and 2.02 GiB are needed (64 MiB of it to stay free)"
    assert not room.shortage(machine(2 * HELD + room.MARGIN), [job(a="b", b="a")] * 2, "none")
    assert room.needs([job()] * 3) == {A: 3 * HELD}, "what others see of it as claimed"


def test_on_another_gpu_it_needs_the_margin() -> None:
    there = job(a="b", b="a")
    assert "GPU 1 has" in short(machine(HELD), there)
    assert not short(machine(HELD + room.MARGIN), there)


def test_where_its_own_gpus_change_places_it_needs_little_more() -> None:
    there = msgspec.structs.replace(job(a="b", b="a"), held={A: HELD, B: HELD})
    assert "GPU 0 has" in short(machine(HELD), there)
    assert not short(machine(HELD + room.NEAR), there)
    assert "GPU 0 has" in short(machine(HELD + room.NEAR, 8), there), "somebody else has come"


def test_what_could_never_come_back_does_not_leave() -> None:
    running = msgspec.structs.replace(job(), was="running", held={A: 4 * HELD - 4 * MIB})
    assert not room.no_way_back(machine(0, 7, used=4 * HELD), [running])
    assert not room.no_way_back(machine(0, 7, 8, used=4 * HELD), [running])
    more = msgspec.structs.replace(running, held={A: 4 * HELD + MIB})
    said = room.no_way_back(machine(0, 7, used=4 * HELD), [more])
    assert said == "GPU 0 has 4,000 MiB when it is empty, and 4,001 MiB would have to come back"
