"""``rm``: an image goes, or what an unfinished one left, and the nftables table that keeps its peers waiting."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from limosa.errors import Busy, LimosaError, UsageError
from limosa.image import open_image
from limosa.image.manifest import LOG_NAME
from limosa.image.remove import remove as remove_folder
from limosa.operation import claims
from limosa.operation.leftovers import remove_table, tables_of

_LONGEST = 4096  # PATH_MAX of Linux


def remove_image(path: str | os.PathLike[str]) -> int:
    """Removes an image, or an unfinished folder, and the nftables table that its dump left.

    Returns:
        Bytes freed.

    Raises:
        UsageError: it is neither.
        Busy: a living checkpoint writes it.
    """
    if len(os.fspath(path)) > _LONGEST:
        raise UsageError(detail=f"a path of {len(os.fspath(path))} characters is none")
    names = claims.names_of(path)
    for claim in claims.everybodys():
        if claim.alive and (found := claims.in_the_way(claim, names)):
            raise Busy(f"{found} is being worked on: {claim.operation} by process {claim.holder.pid}", pid=0)
    tables = []
    with contextlib.suppress(LimosaError), open_image(path, trust=False) as image:
        tables = [image.manifest.nft_table] if image.manifest.nft_table else []
    log_fd = log_folder(path)
    try:
        # An unfinished or damaged one has no manifest to ask; CRIU's log names the run all the same.
        tables += tables_of(log_fd) if log_fd >= 0 else []
        freed = remove_folder(path)
    finally:
        if log_fd >= 0:
            os.close(log_fd)
    for table in set(tables):
        remove_table(table)
    return freed


def log_folder(path: str | os.PathLike[str]) -> int:
    """An image's folder with CRIU's logs, open; -1 where there is none."""
    with contextlib.suppress(OSError):
        return os.open(Path(path, LOG_NAME), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    return -1
