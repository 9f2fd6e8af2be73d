"""A CRIU for a program that starts one by itself: a container runtime takes the ``criu`` that is first on its PATH.

It gets Limosa's, with Limosa's plugin, for one run: by a folder with a small script in it, which goes away again, also
where limosa was killed (:func:`forget`). The system's PATH and its /etc/criu stay as they are; what root has written
there for runtimes still counts.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from limosa import start
from limosa.errors import PermissionDenied
from limosa.process.criu.leftovers import StoppedChildren
from limosa.process.criu.program import Criu
from limosa.process.places import own_folder
from limosa.process.slurp import slurp

_OLD_SECONDS = 24 * 3600.0  # longer than any dump: whoever made it has died
_KEPT = Path("/var/lib/limosa")


@contextlib.contextmanager
def lent(criu: Criu, extra: Sequence[str] = (), *, operation: str, restores: bool = False) -> Iterator[str]:
    """Make a folder whose ``criu`` is this one.

    What a runtime starts beside a container (podman's monitor, containerd's shim) keeps the folder's name on its PATH
    as long as the container lives, and root's programs are looked for there: nobody else may ever make that name.

    Args:
        criu: which.
        extra: arguments of CRIU's that it is always given.
        operation: the id of whose it is.
        restores: whether it is for a restore (``lent_main.py``).

    Yields:
        The folder.

    Raises:
        PermissionDenied: others than root can change where it would be.
    """
    place = kept_places("lent")[0]
    _clear(place)
    folder = Path(tempfile.mkdtemp(prefix=f"criu-{operation}-", dir=place))
    try:
        options = [*extra, "--network-lock", criu.network_lock]
        if criu.plugin_dir:
            options += ["--libdir", criu.plugin_dir]
        # XFSZ: so it can be told to write no more, and undoes what it has done.
        relay, guard = [], ""
        if restores:
            relay = [sys.executable, "-I", "-S", str(Path(__file__).with_name("lent_main.py"))]
            guard = f"export LIMOSA_GUARD={start.installer()}\n"
        text = f'#!/bin/sh\ntrap "" XFSZ\n{guard}exec {shlex.join([*relay, *criu.argv, *options])} "$@"\n'
        script = folder / "criu"
        script.write_text(text)
        script.chmod(0o700)
        yield str(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def work_folder(folder: str) -> Iterator[int]:
    """Make a folder for the logs of what uses a lent CRIU, which goes away with it: an image may be read by several.

    Args:
        folder: what :func:`lent` has made.

    Yields:
        A descriptor of it.
    """
    path = Path(folder, "work")
    path.mkdir(mode=0o700)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def was_lent(pid: int, operation: str) -> bool:
    """Return whether a process has the CRIU on its PATH that was lent to an operation: what that has started keeps it.

    Args:
        pid: the process.
        operation: the operation's id.
    """
    return _has_on_path(pid, b"/criu-%b-" % os.fsencode(operation))


def stopped_children(folder: str) -> StoppedChildren:
    """Return what ends the children that a lent CRIU which was killed has left.

    Args:
        folder: what :func:`lent` has made.
    """
    return StoppedChildren(lambda pid: _has_on_path(pid, os.fsencode(folder)))


def _has_on_path(pid: int, wanted: bytes) -> bool:
    with contextlib.suppress(OSError):
        variables = slurp(f"/proc/{pid}/environ").split(b"\0")
        return any(one.startswith(b"PATH=") and wanted in one for one in variables)
    return False


def forget(operation: str) -> None:
    """Remove what an operation that was killed has left: nothing that it has lent is in use any more.

    Raises:
        OSError: this process can open no file more.
    """
    for place in (own_folder("lent"), _KEPT / "lent"):
        for folder in place.glob(f"criu-{operation}-*"):
            try:
                found = os.lstat(folder)
                if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
                    shutil.rmtree(folder)
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):  # it can be done when it is run again
                    raise


def kept_places(kind: str) -> list[Path]:
    """Return folders in which only root can make anything, and from which programs may be started; the first is used.

    Args:
        kind: what is kept there.
    """
    places = [own_folder(kind), _KEPT / kind]
    if not _may_start_from(places[0]):
        places.reverse()
    places[0].mkdir(mode=0o755, parents=True, exist_ok=True)
    if not start.trusted(places[0]):
        raise PermissionDenied(f"others than root can change {places[0]}")
    return [place for place in places if place.is_dir()]


def _may_start_from(folder: str | os.PathLike[str]) -> bool:
    with contextlib.suppress(OSError):
        return not os.statvfs(folder).f_flag & os.ST_NOEXEC
    return False


def _clear(place: Path) -> None:
    """Remove what was left there long ago."""
    for old in place.glob("criu-*"):
        with contextlib.suppress(OSError):
            if time.time() - old.stat().st_mtime > _OLD_SECONDS:
                shutil.rmtree(old)
