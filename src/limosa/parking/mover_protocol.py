"""The requests to a mover and its answers; ``vault_protocol.py`` has those that both have, and says more."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from limosa.image.chunks import MOST_CHUNK
from limosa.ipc.messages import MOST_DESCRIPTORS, Count, Note, Numbers, Seconds, Text, Word, Words
from limosa.parking.vault_protocol import Request

MOST_NAMES = 1 << 13
"""Names of chunks, or ids of pieces, in one message."""
MOST_THREADS = 32
"""How many chunks the mover has under way at a time, at most."""
_MOST_COPIES = 1 << 16

Speed = Annotated[float, msgspec.Meta(ge=0, le=1e15)]
"""Bytes a second; 0: as fast as it goes."""
Id = Annotated[int, msgspec.Meta(ge=0)]
Ids = Annotated[list[Id], msgspec.Meta(max_length=MOST_NAMES)]
ChunkSize = Annotated[int, msgspec.Meta(ge=1, le=MOST_CHUNK)]


class End(Request, tag="end"):
    """End as soon as nobody needs you."""


# --- memory on GPUs ---------------------------------------------------------------------------------------------------


class Prepare(Request, tag="prepare"):
    """Have contexts on these GPUs (UUIDs) ready."""

    gpus: Words


class Take(Request, tag="take"):
    """Map the memory whose descriptors come along, as a key, to be used from a GPU."""

    key: Word
    sizes: Numbers
    gpu: Word


class Make(Request, tag="make"):
    """Make memory on a GPU, as a key, and give its descriptors."""

    key: Word
    sizes: Numbers
    gpu: Word


class Copy(Request, tag="copy"):
    """Copy from what keys hold to what others hold: source, target, the GPU that copies."""

    copies: Annotated[list[tuple[Word, Word, Word]], msgspec.Meta(max_length=_MOST_COPIES)]


class Drop(Request, tag="drop"):
    """Let go of what was made or taken as a key."""

    key: Word


class DropAll(Request, tag="drop-all"):
    """Let go of all that was made or taken on this connection."""


# --- the arena --------------------------------------------------------------------------------------------------------


class Hold(Request, tag="hold"):
    """Have segments as a key, as one piece of memory."""

    key: Word
    bytes: Count  # how much of it will be used; the rest is made zero where there may be another's
    gpu: Word  # one whose context is there
    pin: bool = False  # whether what is not pinned yet is pinned


class Warm(Request, tag="warm"):
    """Pin segments, and do not end for so many seconds."""

    gpu: Word
    seconds: Seconds


class Pinned(Request, tag="pinned"):
    """Say how many bytes of the arena are pinned."""

    looks = True


class Host(Request, tag="host"):
    """Copy to an arena, or back: key, the arena's key, where in it, the GPU that copies."""

    way: Literal["out", "in"]
    copies: Annotated[list[tuple[Word, Word, Count, Word]], msgspec.Meta(max_length=_MOST_COPIES)]


class Unput(Request, tag="unput"):
    """Let go of what is held under a key."""

    key: Word


# --- chunks of images -------------------------------------------------------------------------------------------------


class Poll(Request, tag="staging-poll"):
    """Say how far it is."""


class Stop(Request, tag="staging-stop"):
    """Leave what was begun."""


class Close(Request, tag="staging-close"):
    """Let go of all of it."""


class _Pieces(Request):
    pid: Count
    ids: Ids
    sizes: Numbers
    gpu: Word


class SaveOpen(Request, tag="save-open"):
    """Begin to save into a folder of chunks of this size; a key for hashes that find changes, or nothing."""

    chunk: ChunkSize
    key: Annotated[bytes, msgspec.Meta(max_length=32)] = b""


class SaveTake(_Pieces, tag="save-take"):
    """Map pieces of a process's memory on a GPU."""


class SaveAside(Request, tag="save-aside"):
    """Pieces in host memory: id, bytes, where in the segments; the GPU that they were on."""

    pid: Count
    places: Annotated[list[tuple[Id, Count, Count]], msgspec.Meta(max_length=MOST_NAMES)]
    gpu: Word


class SaveDrop(Request, tag="save-drop"):
    """Pieces that a process has freed."""

    pid: Count
    ids: Annotated[list[Id], msgspec.Meta(max_length=MOST_DESCRIPTORS)]


class SaveReady(Request, tag="save-ready"):
    """How many bytes of changed chunks must fit into memory."""

    hold: Count


class SaveDiffer(Request, tag="save-differ"):
    """Hash all of it where it is."""


class SaveStart(Request, tag="save-start"):
    """Copy what is marked into files, what has changed into memory, or that into files; whether the job is to end."""

    what: Literal["copy", "keep", "write"]
    rate: Speed = 0.0
    nice: Annotated[int, msgspec.Meta(ge=0, le=19)] = 0
    ends: bool = False


class SaveNames(Request, tag="save-names"):
    """Say what chunks are called: pid, id, from which chunk on, how many."""

    parts: Annotated[list[tuple[Count, Id, Count, Count]], msgspec.Meta(max_length=MOST_NAMES)]


class LoadOpen(Request, tag="load-open"):
    """Begin to load from a folder of chunks of this size."""

    chunk: ChunkSize


class LoadMake(_Pieces, tag="load-make"):
    """Make memory for pieces of a process, and give its descriptors."""


class LoadTake(_Pieces, tag="load-take"):
    """Map pieces of a process's memory on a GPU."""


class LoadMove(_Pieces, tag="load-move"):
    """Copy what was read for pieces into memory that their process has made itself, on the same GPU."""


class LoadDrop(Request, tag="load-drop"):
    """Let go of pieces, and of what was read for them."""

    pid: Count
    ids: Annotated[list[Id], msgspec.Meta(max_length=MOST_DESCRIPTORS)]


class LoadWant(Request, tag="load-want"):
    """What belongs where: pid, id, from which chunk on, names of 32 bytes each."""

    parts: Annotated[
        list[tuple[Count, Id, Count, Annotated[bytes, msgspec.Meta(max_length=32 * MOST_NAMES)]]],
        msgspec.Meta(max_length=MOST_NAMES),
    ]


class LoadStart(Request, tag="load-start"):
    """Read what is wanted."""


# --- answers ----------------------------------------------------------------------------------------------------------


class Took(msgspec.Struct):
    """How long it took."""

    seconds: Seconds


class Copied(msgspec.Struct):
    """How many bytes."""

    bytes: Count


class Noted(msgspec.Struct):
    """What a key holds: whether anything, how many descriptors, what is to be known about them."""

    there: bool
    note: Note = b""
    n: Count = 0


class Refusal(msgspec.Struct):
    """What it could not do, if anything, and the driver's word for it."""

    error: Text | None = None
    result: Word = ""


class Failed(msgspec.Struct, frozen=True):
    """Why the work with chunks ended."""

    text: Text = ""
    kind: Word = ""
    errno: Annotated[int, msgspec.Meta(ge=0, lt=4096)] = 0
    result: Word = ""


class Progress(msgspec.Struct, frozen=True):
    """How far the work with chunks is."""

    done: Count
    total: Count
    running: bool
    chunks: Count = 0
    seconds: Seconds = 0.0
    failed: Failed | None = None


class Changed(msgspec.Struct, frozen=True):
    """What has changed: chunks, their bytes, how long looking took."""

    changed: Count
    bytes: Count
    seconds: Seconds
