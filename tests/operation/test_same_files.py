"""What CRIU has mapped is compared with what was looked at; ``tests/e2e/test_e2e_exchanged.py`` does it with CRIU."""

from __future__ import annotations

import ctypes
import mmap
import os
from types import SimpleNamespace
from typing import Any

import pytest

from limosa.operation import same_files
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


@pytest.mark.parametrize(
    ("at", "fine"),
    [("/a/b/c", True), ("/a/c", True), ("/c", True), ("/a/b", False), ("/a/b/c/c", False), ("/x/c", False)],
)
def test_a_folder_that_was_removed_is_made_at_its_name_or_above(at: str, fine: bool) -> None:
    """CRIU makes it where its own parents are gone too: in the nearest that is there."""
    assert same_files._is_folder_anew(at, "/a/b/c") is fine
