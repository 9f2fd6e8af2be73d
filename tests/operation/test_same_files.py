"""What CRIU has mapped is compared with what was looked at; ``tests/e2e/test_e2e_exchanged.py`` does it with CRIU."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from limosa.errors import NoWorkingCriu
from limosa.operation import same_files
from limosa.operation.same_files import Looked, seen
from limosa.process.criu.named import Named, Remapped


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


@pytest.mark.parametrize(
    ("at", "owner", "fine"),
    [
        ("job/gone", None, True),
        ("job/gone.cr_link", None, True),
        ("job/gone", (4242, 4242), False),
        ("job/other", None, False),
        ("roots/gone", None, False),
        ("job/gone/gone", None, False),
    ],
)
def test_a_deleted_file_that_is_made_anew_is_at_its_own_name_and_its_owners(
    tmp_path: Path, at: str, owner: tuple[int, int] | None, fine: bool
) -> None:
    """A user who puts a link to /proc/PID/fd/N in its place has CRIU open somebody's deleted file."""
    looked: Any = Looked.__new__(Looked)
    looked._since = time.time() - 1
    name, path = f"{tmp_path}/job/gone", tmp_path / at
    path.parent.mkdir(parents=True)
    with open(path, "w+b") as file:
        path.unlink()
        info, link = os.fstat(file.fileno()), os.readlink(f"/proc/self/fd/{file.fileno()}")
        anew = Remapped("ghost", owner=owner or (info.st_uid, info.st_gid))
        assert looked._is_anew(info, link, anew, name) is fine


@pytest.mark.parametrize("what", ["sockets", "names"])
def test_without_a_guard_nothing_is_made_in_folders_of_others(what: str, tmp_path: Path) -> None:
    others = tmp_path / "others"
    others.mkdir(mode=0o777)
    others.chmod(0o777)
    for folder, refused in ((others, True), (Path("/run"), False)):
        looked: Any = Looked.__new__(Looked)
        name = str(folder / "gone" / "name")
        looked._named = Named(remapped={7: Remapped("ghost")})
        if what == "sockets":
            looked._named.sockets[name] = 0
        else:
            looked._named.names[7] = name
        if refused:
            with pytest.raises(NoWorkingCriu, match="others than root"):
                looked.need_guard()
        else:
            looked.need_guard()
