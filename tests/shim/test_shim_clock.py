"""The steady clock of a library that watches over communicators: it all but stands still while those are closed."""

from __future__ import annotations

import ctypes
import os
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from limosa.native.build import SHIM, compilers

NOW = "_ZNSt6chrono3_V212steady_clock3nowEv"
SKEW = 1_000_000  # ns: the clocks of a virtual machine's processors were seen to differ by microseconds
SECOND = 10**9


@pytest.fixture
def clock(tmp_path: Path) -> ctypes.CDLL:
    """A library with a clock of its own."""
    made = tmp_path / "ticking.so"
    source = Path(__file__).with_name("ticking.c")
    flags = [
        "-std=c11",
        "-D_GNU_SOURCE",
        "-O1",
        "-fno-optimize-sibling-calls",
        "-fPIC",
        "-shared",
        "-pthread",
        "-Wl,-Bsymbolic",
    ]
    subprocess.run([*compilers()[0], *flags, f"-I{SHIM}", "-o", made, source, "-ldl"], check=True, timeout=60)
    library = ctypes.CDLL(str(made))
    for name in (NOW, "reads", "waits", "expects"):
        getattr(library, name).restype = ctypes.c_int64
    library.waits.argtypes = library.expects.argtypes = [ctypes.c_int64]
    library.goes_back.restype = ctypes.c_bool
    return library


def stops(clock: ctypes.CDLL, seconds: float) -> None:
    clock.clock_stop()
    time.sleep(seconds)
    clock.clock_go()


def behind(clock: ctypes.CDLL) -> tuple[int, int]:
    """How far it is behind the kernel's: at least, at most."""
    before, now = time.monotonic_ns(), clock.reads()
    return before - now, time.monotonic_ns() - now


def test_it_is_the_kernels_until_it_was_stopped(clock: ctypes.CDLL) -> None:
    clock.becomes_known()
    before = time.monotonic_ns()
    assert before <= clock.reads() <= time.monotonic_ns()


def test_the_time_in_which_it_stood_is_left_out(clock: ctypes.CDLL) -> None:
    clock.becomes_known()
    before = clock.reads()
    clock.clock_stop()
    stood = clock.reads()
    clock.clock_stop()  # it stands already
    time.sleep(0.2)
    assert before <= stood < clock.reads() < stood + 0.01 * SECOND  # it creeps
    clock.clock_go()
    clock.clock_go()
    least, most = behind(clock)
    assert most >= 0.2 * SECOND
    stops(clock, 0.1)
    assert behind(clock)[1] >= least + 0.1 * SECOND


def test_nobody_elses_clock_is_touched(clock: ctypes.CDLL) -> None:
    clock.becomes_known()
    clock.clock_stop()
    time.sleep(0.05)
    before = time.monotonic_ns()
    assert before - SKEW <= getattr(clock, NOW)() <= time.monotonic_ns() + SKEW  # the caller is libffi
    clock.clock_go()


def test_who_becomes_known_later_sees_no_jump(clock: ctypes.CDLL) -> None:
    stops(clock, 0.2)
    before = clock.reads()
    clock.becomes_known()
    assert before - SKEW <= clock.reads() <= time.monotonic_ns() + SKEW
    assert behind(clock)[0] < 0.2 * SECOND
    stops(clock, 0.1)
    assert behind(clock)[1] >= 0.1 * SECOND


def test_it_never_goes_back(clock: ctypes.CDLL) -> None:
    clock.becomes_known()
    found: list[bool] = []
    readers = [threading.Thread(target=lambda: found.append(clock.goes_back())) for _ in range(3)]
    for reader in readers:
        reader.start()
    end = time.monotonic() + 1
    while time.monotonic() < end:
        clock.clock_stop()
        clock.clock_go()
    clock.ends()
    for reader in readers:
        reader.join(60)
    assert found == [False] * 3


@pytest.mark.parametrize("way", ["waits", "expects"])
def test_a_wait_lasts_as_long_as_it_should(way: str, clock: ctypes.CDLL) -> None:
    clock.becomes_known()
    stops(clock, 1)
    assert 0.19 * SECOND <= getattr(clock, way)(SECOND // 5) < 60 * SECOND
    clock.clock_stop()
    assert getattr(clock, way)(SECOND // 5) >= 0.19 * SECOND  # the time may not have come then
    clock.clock_go()


def test_it_goes_in_a_child_that_was_forked_meanwhile(clock: ctypes.CDLL) -> None:
    clock.becomes_known()
    clock.clock_stop()
    if not (pid := os.fork()):
        clock.clock_in_child()
        before = clock.reads()
        time.sleep(0.01)
        os._exit(clock.reads() - before < 10**7)
    assert os.waitpid(pid, 0)[1] == 0
    clock.clock_go()


@pytest.mark.parametrize("preloaded", [True, False])
def test_a_program_of_libstdcxx_gets_the_shims(preloaded: bool, compiled: Callable[..., Path], library: Path) -> None:
    program = compiled("steady.c", "-l:libstdc++.so.6", "-ldl")
    env = {"LD_PRELOAD": str(library)} if preloaded else {}
    said = subprocess.run([program], capture_output=True, text=True, env=env, timeout=60, check=True).stdout
    assert (str(library) in said, "libstdc++" in said) == (preloaded, not preloaded)
