"""The images in a folder: what each manifest says about its job, and which are unfinished."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from limosa.errors import LimosaError, NoSuchImage
from limosa.image.manifest import MANIFEST_NAME
from limosa.image.read import is_partial_name, open_image
from limosa.image.trust import doubt
from limosa.image.unfinished import Unfinished, unfinished


class Listed(msgspec.Struct, kw_only=True):
    """One image, by its manifest alone: ``verify`` reads its bytes.

    Attributes:
        path: the folder, absolute.
        state: "complete" (its checkpoint ended well), "writing" (one is at it), "unfinished" (nobody is), "damaged".
        id: of the image, or "".
        name, pid, uid: of its job; "" and 0 where that is not known.
        bytes: size of its files.
        device_bytes: what of the job's memory was on GPUs.
        gpus: their names, one each.
        created: RFC 3339, or "".
        host: where it was made.
        problem: what is the matter with one that is not complete, or that ``restore`` would refuse.
    """

    path: str
    state: str
    id: str = ""
    name: str = ""
    pid: int = 0
    uid: int = -1
    bytes: int = 0
    device_bytes: int = 0
    gpus: list[str] = []
    created: str = ""
    host: str = ""
    problem: str = ""


def images(folder: str | os.PathLike[str] = ".") -> list[Listed]:
    """The images in a folder (or the folder itself, where it is one), the oldest first; not those in folders below.

    It reports the owners and refuses none, because it only looks. Links are not followed.

    Raises:
        NoSuchImage: there is no such folder, or it may not be read.
    """
    place = Path(folder).absolute()
    try:
        if (place / MANIFEST_NAME).is_file():
            return [_listed(place)]
        with os.scandir(place) as found:
            folders = [Path(e.path) for e in found if e.is_dir(follow_symlinks=False) and not is_partial_name(e.name)]
        listed = [_listed(path) for path in folders if os.path.lexists(path / MANIFEST_NAME)]
        listed += [_unfinished(one) for one in unfinished(place, only_look=True)]
    except OSError as error:
        raise NoSuchImage(f"{place} cannot be looked into: {error.strerror}", hint="limosa images DIR") from error
    return sorted(listed, key=lambda one: (one.created, one.path))


def _unfinished(one: Unfinished) -> Listed:
    if one.state == "alive":
        problem = f"process {one.owner.partition('@')[0]} is writing it"
        return Listed(path=str(one.path), state="writing", created=one.since, problem=problem)
    problem = "its checkpoint never ended" if one.state == "dead" else "another machine may be writing it"
    return Listed(path=str(one.path), state="unfinished", created=one.since, problem=problem)


def _listed(path: Path) -> Listed:
    try:
        with open_image(path, trust=False) as image:
            made = image.manifest
            return Listed(
                path=str(path),
                state="complete",
                id=image.id,
                name=made.job.name or "",
                pid=made.job.pid,
                uid=made.job.uid,
                bytes=made.bytes,
                device_bytes=sum(gpu.bytes for gpu in made.gpus),
                gpus=[gpu.name for gpu in made.gpus if gpu.bytes],
                created=made.created,
                host=made.hostname,
                problem=f"restore would refuse it: {why}" if (why := doubt(image.fd, path, parts=False)) else "",
            )
    except LimosaError as error:
        return Listed(path=str(path), state="damaged", problem=error.message)
