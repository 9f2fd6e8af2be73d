"""What is on disk: writing an image, opening it, checking it, removing it (``docs/image-format.md``).

A module behind a name is loaded when that is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from limosa.on_demand import on_demand

if TYPE_CHECKING:
    from limosa.image.chunks import Chunks as Chunks
    from limosa.image.draft import Draft as Draft
    from limosa.image.draft import destination_taken as destination_taken
    from limosa.image.draft import free_bytes as free_bytes
    from limosa.image.draft import missing_parent as missing_parent
    from limosa.image.files import copy_sparse as copy_sparse
    from limosa.image.files import open_file as open_file
    from limosa.image.listing import Listed as Listed
    from limosa.image.listing import images as images
    from limosa.image.manifest import ContainerRecord as ContainerRecord
    from limosa.image.manifest import DeviceMemory as DeviceMemory
    from limosa.image.manifest import DevicePiece as DevicePiece
    from limosa.image.manifest import GpuRecord as GpuRecord
    from limosa.image.manifest import ImageFile as ImageFile
    from limosa.image.manifest import JobRecord as JobRecord
    from limosa.image.manifest import LockedFile as LockedFile
    from limosa.image.manifest import Manifest as Manifest
    from limosa.image.manifest import OpenFile as OpenFile
    from limosa.image.manifest import ShmFile as ShmFile
    from limosa.image.manifest import TreeProcess as TreeProcess
    from limosa.image.manifest import now as now
    from limosa.image.read import Image as Image
    from limosa.image.read import open_image as open_image
    from limosa.image.remove import remove as remove
    from limosa.image.sync import CommitTimings as CommitTimings
    from limosa.image.trust import destination_problem as destination_problem
    from limosa.image.trust import trusted_uids as trusted_uids
    from limosa.image.unfinished import Unfinished as Unfinished
    from limosa.image.unfinished import unfinished as unfinished
    from limosa.image.verify import FileCheck as FileCheck
    from limosa.image.verify import Problem as Problem
    from limosa.image.verify import VerifyResult as VerifyResult
    from limosa.image.verify import verify as verify

_WHERE = {
    "Chunks": "chunks",
    "CommitTimings": "sync",
    "ContainerRecord": "manifest",
    "DeviceMemory": "manifest",
    "DevicePiece": "manifest",
    "Draft": "draft",
    "FileCheck": "verify",
    "GpuRecord": "manifest",
    "Image": "read",
    "ImageFile": "manifest",
    "JobRecord": "manifest",
    "Listed": "listing",
    "LockedFile": "manifest",
    "Manifest": "manifest",
    "OpenFile": "manifest",
    "Problem": "verify",
    "ShmFile": "manifest",
    "TreeProcess": "manifest",
    "Unfinished": "unfinished",
    "VerifyResult": "verify",
    "copy_sparse": "files",
    "destination_problem": "trust",
    "destination_taken": "draft",
    "free_bytes": "draft",
    "images": "listing",
    "missing_parent": "draft",
    "now": "manifest",
    "open_file": "files",
    "open_image": "read",
    "remove": "remove",
    "trusted_uids": "trust",
    "unfinished": "unfinished",
    "verify": "verify",
}

__all__ = list(_WHERE)

on_demand(__name__)
