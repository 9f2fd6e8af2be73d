"""Whether a process is under the shim, from outside."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from limosa.parking.shim import under_shim


@contextmanager
def asleep(preload: Path | None) -> Iterator[int]:
    """A process that does nothing, once its loader is done."""
    env = {"PATH": os.environ["PATH"], **({"LD_PRELOAD": str(preload)} if preload else {})}
    with subprocess.Popen(["sh", "-c", "echo there; exec sleep 60"], env=env, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"there\n"
        end = time.monotonic() + 60
        while b"sleep" not in Path(f"/proc/{process.pid}/cmdline").read_bytes()[:5] and time.monotonic() < end:
            time.sleep(0.01)
        try:
            yield process.pid
        finally:
            process.kill()


def test_a_library_that_was_replaced_since_is_seen(library: Path, tmp_path: Path) -> None:
    """A newer Limosa takes the place of the one that the job was started with."""
    old = shutil.copy(library, tmp_path)
    with asleep(old) as pid:
        end = time.monotonic() + 60
        while not under_shim(pid) and time.monotonic() < end:
            time.sleep(0.01)
        assert under_shim(pid)
        Path(old).unlink()
        assert under_shim(pid)


def test_without_the_library_it_is_not(library: Path) -> None:
    with asleep(None) as pid:
        assert not under_shim(pid)
