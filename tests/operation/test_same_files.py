"""What CRIU has mapped is compared with what was looked at; ``tests/e2e/test_e2e_exchanged.py`` does it with CRIU."""

from __future__ import annotations

import ctypes
import mmap
import os
from types import SimpleNamespace
from typing import Any

import pytest

from limosa.operation.same_files import Looked, seen


@pytest.mark.parametrize(("name", "fine"), [("/dev/nvidia0", True), ("/dev/nvidiactl", True), ("/data/weights", False)])
def test_zeroes_stand_for_gpu_memory_that_a_child_has_inherited_and_for_nothing_else(name: str, fine: bool) -> None:
    """Our plugin has CRIU map them: a DataLoader's worker has such mappings, and was refused on real GPUs."""
    looked: Any = Looked.__new__(Looked)
    looked._named = SimpleNamespace(names={7: name}, remapped={})
    looked._files = {name: seen(os.stat("/dev/null"))}
    looked._proc = os.stat("/proc").st_dev
    with mmap.mmap(-1, mmap.PAGESIZE) as zeroes:  # shared, as /dev/zero mapped shared is
        view = ctypes.c_char.from_buffer(zeroes)
        start = ctypes.addressof(view)
        path = f"/proc/self/map_files/{start:x}-{start + mmap.PAGESIZE:x}"
        assert os.readlink(path) == "/dev/zero (deleted)"
        reason = looked._other(os.getpid(), f"the mapping at {start:x}", 7, path)
        del view
    assert (reason is None) == fine
