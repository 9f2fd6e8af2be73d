"""Making host memory grow where it can, and never pushing a machine over where it cannot."""

from __future__ import annotations

import mmap
import os

import pytest

from limosa.process.memory import grow_host_memory, host_memory

MIB, GIB = 1 << 20, 1 << 30


class Machine:
    """A machine that backs memory when it is first used: MemTotal grows in steps until ``most``."""

    def __init__(self, total: int, used: int, most: int, fails: bool = False):
        self.total, self.used, self.most, self.fails = total, used, most, fails
        self.held, self.lowest = 0, total

    def read(self) -> tuple[int, int]:
        return self.total, self.total - self.used - self.held

    def touch(self, size: int):
        if self.fails:
            raise OSError("no more")
        self.held += size
        self.total = min(self.most, self.total + 2 * size)
        self.lowest = min(self.lowest, self.read()[1])

        def free() -> None:
            self.held -= size

        return free

    def grow(self, needed: int, own_room: int = 1 << 60) -> int:
        return grow_host_memory(needed, read=self.read, touch=self.touch, own_room=lambda: own_room, pause=0)


def test_nothing_is_touched_where_there_is_enough():
    machine = Machine(16 * GIB, 1 * GIB, 16 * GIB)
    assert machine.grow(10 * GIB) == 15 * GIB
    assert machine.lowest == machine.total


def test_a_machine_that_grows_is_made_to():
    machine = Machine(8 * GIB, 1 * GIB, 128 * GIB)
    assert machine.grow(20 * GIB) >= 20 * GIB
    assert machine.held == 0, "all is given back"
    assert machine.total < 30 * GIB, "no more than was needed"


def test_a_machine_that_does_not_grow_is_left_alone_after_three_chunks():
    machine = Machine(16 * GIB, 1 * GIB, 16 * GIB)
    assert machine.grow(20 * GIB) == 15 * GIB
    assert machine.held == 0
    assert machine.lowest >= 14 * GIB


def test_growth_that_ends_early_is_noticed():
    machine = Machine(8 * GIB, 1 * GIB, 10 * GIB)
    assert machine.grow(20 * GIB) == 9 * GIB
    assert machine.lowest > 6 * GIB


@pytest.mark.parametrize(("total", "used"), [(2 * GIB, 2 * GIB - 500 * MIB), (64 * GIB, 58 * GIB)])
def test_a_machine_that_is_nearly_full_is_not_touched(total, used):
    machine = Machine(total, used, 2 * total)
    assert machine.grow(total) == total - used
    assert machine.lowest == total


def test_limosas_own_cgroup_is_not_pushed_over():
    machine = Machine(8 * GIB, 1 * GIB, 128 * GIB)
    assert machine.grow(20 * GIB, own_room=300 * MIB) == 7 * GIB


def test_a_refused_mapping_ends_it():
    assert Machine(8 * GIB, 1 * GIB, 128 * GIB, fails=True).grow(20 * GIB) == 7 * GIB


def test_on_this_machine_memory_is_really_touched_and_given_back():
    total, available = host_memory()
    before = resident()
    seen = []

    def read() -> tuple[int, int]:
        seen.append(resident())
        return host_memory()

    after = grow_host_memory(total * 4, read=read, pause=0)
    assert max(seen) - before >= 250 * MIB, "populated, not only mapped"
    assert resident() - before < 50 * MIB
    assert after > available // 2


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


def test_meminfo_is_in_bytes():
    total, available = host_memory()
    assert total == pytest.approx(os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE, rel=0.05)
    assert 0 < available <= total


def test_it_ends_between_two_chunks_when_it_is_told_to():
    machine, looks = Machine(8 * GIB, 1 * GIB, 128 * GIB), []

    def stop() -> bool:
        looks.append(machine.held)
        return len(looks) > 2

    grow_host_memory(60 * GIB, read=machine.read, touch=machine.touch, own_room=lambda: 1 << 60, pause=0, stop=stop)
    assert looks == [0, 256 * MIB, 512 * MIB]
    assert machine.held == 0
