"""What is on disk: writing an image, opening it, checking it, removing it (``docs/image-format.md``)."""

from limosa.image.chunks import Chunks
from limosa.image.draft import Draft, destination_taken, free_bytes, missing_parent
from limosa.image.files import copy_sparse, open_file
from limosa.image.listing import Listed, images
from limosa.image.manifest import (
    DeviceMemory,
    DevicePiece,
    GpuRecord,
    ImageFile,
    JobRecord,
    LockedFile,
    Manifest,
    OpenFile,
    ShmFile,
    TreeProcess,
    now,
)
from limosa.image.read import Image, open_image
from limosa.image.remove import remove
from limosa.image.sync import CommitTimings
from limosa.image.trust import destination_problem, trusted_uids
from limosa.image.unfinished import Unfinished, unfinished
from limosa.image.verify import FileCheck, Problem, VerifyResult, verify

__all__ = [
    "Chunks",
    "CommitTimings",
    "DeviceMemory",
    "DevicePiece",
    "Draft",
    "FileCheck",
    "GpuRecord",
    "Image",
    "ImageFile",
    "JobRecord",
    "Listed",
    "LockedFile",
    "Manifest",
    "OpenFile",
    "Problem",
    "ShmFile",
    "TreeProcess",
    "Unfinished",
    "VerifyResult",
    "copy_sparse",
    "destination_problem",
    "destination_taken",
    "free_bytes",
    "images",
    "missing_parent",
    "now",
    "open_file",
    "open_image",
    "remove",
    "trusted_uids",
    "unfinished",
    "verify",
]
