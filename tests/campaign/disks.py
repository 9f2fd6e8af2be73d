"""Disks that are full or small, in place of a folder."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path


def full_disk(folder: Path) -> Callable[[], None]:
    """A full disk under the runtime folder until the function that is returned is called."""
    return small_disk(folder, 4 << 20, full=True)


def small_disk(folder: Path, size: int, *, full: bool = False) -> Callable[[], None]:
    """A disk of that size in place of a folder; what is in it stays."""
    folder.mkdir(parents=True, exist_ok=True)
    beside = folder.with_name(folder.name + "-kept")
    content = sorted(folder.iterdir())
    beside.mkdir()
    for path in content:
        os.rename(path, beside / path.name)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=1777", "tmpfs", str(folder)], check=True)
    for path in sorted(beside.iterdir()):
        if not path.name.startswith("image-"):
            _copy(path, folder / path.name) if path.is_dir() else shutil.copy2(path, folder / path.name)
    if full:
        with contextlib.suppress(OSError), open(folder / "filling", "wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    def undo() -> None:
        shutil.rmtree(folder / "filling", ignore_errors=True)
        with contextlib.suppress(OSError):
            os.unlink(folder / "filling")
        told = folder.with_name(folder.name + "-told")
        shutil.rmtree(told, ignore_errors=True)
        _copy(folder, told)
        subprocess.run(["umount", str(folder)], check=True)
        for path in beside.iterdir():
            if path.name.startswith("image-") and not (told / path.name).exists():
                os.rename(path, told / path.name)
        for path in told.iterdir():
            os.rename(path, folder / path.name)
        shutil.rmtree(told)
        for path in _sockets_below(beside):
            with contextlib.suppress(OSError):  # the folder that it was in has gone
                os.rename(path, folder / path.relative_to(beside))
        shutil.rmtree(beside, ignore_errors=True)

    return undo


def _copy(folder: Path, to: Path) -> None:
    """All but sockets: a worker that waits cannot be copied."""
    shutil.copytree(folder, to, symlinks=True, ignore=_sockets)


def _sockets(folder: str, names: Sequence[str]) -> list[str]:
    return [name for name in names if stat.S_ISSOCK(os.lstat(os.path.join(folder, name)).st_mode)]


def _sockets_below(folder: Path) -> Iterator[Path]:
    for place, _, names in os.walk(folder):
        yield from (Path(place, name) for name in _sockets(place, names))
