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
    check_place,
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
    "install_with_spec",
    "installed_spec",
    "remove",
    "shim_spec",
    "spec_path",
    "text_of",
    "write_spec",
]


def install_with_spec(path: Path) -> tuple[Libraries, bool]:
    """Install the libraries and write the spec that names them, or leave both as they were.

    Returns:
        The libraries, and whether anything was changed.

    Raises:
        NoLibrary, PermissionDenied: as :func:`install`.
        OSError: as :func:`install` and :func:`write_spec`.
    """
    check_place(path)
    libraries = install()
    try:
        changed = write_spec(shim_spec(libraries), path)
    except BaseException:
        if not libraries.there:
            place.take_back(libraries.folder)
        raise
    return libraries, changed or not libraries.there


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
