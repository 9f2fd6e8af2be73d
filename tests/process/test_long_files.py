"""What is read of processes has a bound: command lines, environments and mappings are as long as a user likes."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from limosa.operation.jobs import command_of
from limosa.operation.parked.gates import _is_in_reach
from limosa.process import slurp
from limosa.process.candidates import candidates, is_own
from limosa.process.hazards import common_hazards
from limosa.process.observe import observe
from limosa.process.procfs import read_maps

LONG = """
def lengthen(which, size):  # its command line or environment becomes empty memory: nobody needs a right for it
    words = open("/proc/self/stat").read().rpartition(")")[2].split()
    stat = {n: int(word) for n, word in enumerate(words[1:], 4)}
    libc.mmap.restype = libc.sbrk.restype = ctypes.c_void_p
    at = libc.mmap(None, ctypes.c_size_t(size), 1, 0x4022, -1, 0)
    spans = {"cmdline": [stat[48], stat[49]], "environ": [stat[50], stat[51]], which: [at, at + size]}
    of_code = [stat[26], stat[27], stat[45], stat[46], stat[47], libc.sbrk(0), stat[28]]
    what = struct.pack("12Q2I", *of_code, *spans["cmdline"], *spans["environ"], 0, 0, 0xFFFFFFFF)
    assert libc.prctl(35, 14, what, ctypes.c_ulong(len(what)), 0) == 0
"""
LIBRARY = (
    "open(folder + '/libcuda.so.1', 'wb').write(bytes(4096)); f = open(folder + '/libcuda.so.1', 'rb')\n"
    "library = mmap.mmap(f.fileno(), 4096, prot=mmap.PROT_READ)\n"
)
SIZE = 128 << 20


@pytest.fixture
def little() -> Iterator[None]:
    """Nothing takes much memory meanwhile."""
    tracemalloc.start()
    yield
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 24 << 20


def test_a_long_command_line_takes_no_memory(job: Callable[..., Any], little: None) -> None:
    victim = job(f"{LONG}\n{LIBRARY}\nlengthen('cmdline', {SIZE})")
    assert victim.pid in candidates()
    assert not is_own(victim.pid)
    shown = command_of(victim.pid)
    assert len(shown) <= slurp.MOST_COMMAND
    seen = observe(victim.identity).processes[0]
    assert len(seen.command) <= slurp.MOST_COMMAND
    assert seen.unreadable == []


def test_an_environment_that_no_program_is_started_with_is_refused_and_not_cut(
    job: Callable[..., Any], little: None
) -> None:
    victim = job(f"{LONG}\nlengthen('environ', {SIZE})")
    assert not _is_in_reach(victim.pid)
    seen = observe(victim.identity)
    assert seen.processes[0].unreadable == ["environ"]
    (reason,) = [r for r in common_hazards(seen) if r.id == "permission"]
    assert reason.exit_code == 11
    assert f"environ of /proc/{victim.pid}" in reason.text


def test_an_environment_as_long_as_can_be_is_read_to_its_end(job: Callable[..., Any]) -> None:
    long = {f"LONG{n}": "RANK=9" * 20_000 for n in range(10)}
    victim = job("", env={**os.environ, **long, "OTHER_WORLD_SIZE": "8", "WORLD_SIZE": "4", "MASTER_ADDR": "x" * 9999})
    env = observe(victim.identity).processes[0].env
    assert {n: env.get(n) for n in ("RANK", "WORLD_SIZE")} == {"RANK": None, "WORLD_SIZE": "4"}
    assert len(env["MASTER_ADDR"]) == 4096


def test_long_lists_of_mappings_are_read_to_their_end(tmp_path: Path, little: None) -> None:
    lines = [f"{n:08x}000-{n + 1:08x}000 r--p 0 00:01 7 /{'x' * 3000}\n" for n in range(20_000)]
    (tmp_path / "maps").write_text("".join(lines) + "7f0000000000-7f0000001000 rw-s 0 00:06 513 /dev/nvidia-uvm\n")
    del lines
    tracemalloc.reset_peak()
    found = read_maps(str(tmp_path))
    assert (found.lines, found.uvm, found.managed, len(found.merged)) == (20_001, 1, 1, 2)


def test_names_of_mappings_without_end_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("limosa.process.procfs.MOST", 1 << 20)
    names = (f"{n:08x}000-{n + 1:08x}000 r--p 0 00:01 {n} /{n}{'x' * 3000}\n" for n in range(1000))
    (tmp_path / "maps").write_text("".join(names))
    with pytest.raises(slurp.TooLong):
        read_maps(str(tmp_path))
