"""The shim comes into containers: a CDI spec that their runtimes read, and the libraries it mounts.

``place`` puts the libraries where they live on, ``spec`` writes what the runtimes read, ``runtimes`` looks whether they
do, and has them do it.
"""

from __future__ import annotations

from pathlib import Path

from limosa.cdi import place
from limosa.cdi.place import Libraries, install
from limosa.cdi.spec import (
    DEVICE,
    FOLDERS,
    KIND,
    Spec,
    installed_spec,
    read_spec,
    shim_spec,
    spec_path,
    text_of,
    write_spec,
)

__all__ = [
    "DEVICE",
    "FOLDERS",
    "Libraries",
    "Spec",
    "install",
    "installed_spec",
    "remove",
    "shim_spec",
    "spec_path",
    "text_of",
    "write_spec",
]


def remove(path: Path) -> tuple[bool, list[Path]]:
    """Remove our spec (a file with something else stays), then the libraries that no process has mounted.

    Returns:
        Whether there was a spec, and the folders of libraries that stay.

    Raises:
        OSError: something cannot be removed.
    """
    spec = read_spec(path)
    if spec is not None and spec.kind == KIND:
        path.unlink()
    return spec is not None and spec.kind == KIND, place.remove()
