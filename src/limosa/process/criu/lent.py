"""A CRIU for a program that starts one by itself: a container runtime takes the ``criu`` that is first on its PATH.

It gets Limosa's, with Limosa's plugin, for one run: by a folder with a small script in it, which goes away again, also
where limosa was killed (:func:`forget`). The system's PATH and its /etc/criu stay as they are; what root has written
there for runtimes still counts.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from limosa.process.criu.program import Criu
from limosa.process.places import own_folder

_OLD_SECONDS = 24 * 3600.0  # longer than any dump: whoever made it has died
_ELSEWHERE = ("/var/tmp", "/tmp")  # noqa: S108 - a folder of a new name, which is the caller's alone


@contextlib.contextmanager
def lent(criu: Criu, extra: Sequence[str] = (), *, operation: str, restores: bool = False) -> Iterator[str]:
    """Make a folder whose ``criu`` is this one.

    Args:
        criu: which.
        extra: arguments of CRIU's that it is always given.
        operation: the id of whose it is.
        restores: whether it is for a restore (``lent_main.py``).

    Yields:
        The folder.
    """
    folder = Path(tempfile.mkdtemp(prefix=f"criu-{operation}-", dir=_place()))
    try:
        options = [*extra, "--network-lock", criu.network_lock]
        if criu.plugin_dir:
            options += ["--libdir", criu.plugin_dir]
        # XFSZ: so it can be told to write no more, and undoes what it has done.
        relay = [sys.executable, "-I", "-S", str(Path(__file__).with_name("lent_main.py"))] if restores else []
        text = f'#!/bin/sh\ntrap "" XFSZ\nexec {shlex.join([*relay, *criu.argv, *options])} "$@"\n'
        script = folder / "criu"
        script.write_text(text)
        script.chmod(0o700)
        yield str(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def forget(operation: str) -> None:
    """Remove what an operation that was killed has left: nothing that it has lent is in use any more."""
    for place in (str(own_folder("lent")), *_ELSEWHERE):
        for folder in Path(place).glob(f"criu-{operation}-*"):
            with contextlib.suppress(OSError):
                found = os.lstat(folder)
                if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
                    shutil.rmtree(folder)


def _place() -> str:
    """Where programs may be started from."""
    own = own_folder("lent")
    for old in own.glob("criu-*"):
        with contextlib.suppress(OSError):
            if time.time() - old.stat().st_mtime > _OLD_SECONDS:
                shutil.rmtree(old)
    for folder in (str(own), *_ELSEWHERE):
        with contextlib.suppress(OSError):
            if not os.statvfs(folder).f_flag & os.ST_NOEXEC:
                return folder
    return str(own)
