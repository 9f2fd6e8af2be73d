"""The requests to a vault and its answers, and those that a mover has as well; both sides have them from here.

What comes from the other side is decoded as one of these and bounded by them. Neither side believes anything else.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec

from limosa.ipc.messages import Count, Note, Numbers, Seconds, Text, Word

CALL_SECONDS = 60.0
NO_ROOM = "no room in the arena"
MOST_KEYS = 1 << 16


class Request(msgspec.Struct, tag_field="verb", kw_only=True):
    """What all that is asked has in common: after how many seconds whoever asks takes a mover for hung.

    Attributes:
        looks: whether it only looks. That is no use of vault or mover: they end no later for it.
    """

    looks: ClassVar[bool] = False
    limit: Seconds = CALL_SECONDS


class Put(Request, tag="put"):
    """Hold the descriptors, which are so many, under a key, instead of what it held."""

    key: Word
    n: Count
    note: Note = b""


class Get(Request, tag="get"):
    """Give what a key holds."""

    key: Word


class Drop(Request, tag="drop"):
    """Let go of a key; ``again`` where segments of the arena may be another's."""

    key: Word
    again: bool = False


class Keys(Request, tag="keys"):
    """Say what is held."""

    looks = True


class Ping(Request, tag="ping"):
    """Say who you are; of a mover also how busy, on which GPUs, and when it ends."""

    looks = True


class Segments(Request, tag="segments"):
    """Make segments of the arena a key's."""

    key: Word
    sizes: Numbers
    cap: Count
    again: bool = False


class Reserve(Request, tag="reserve"):
    """Have the arena so large for so long."""

    bytes: Annotated[int, msgspec.Meta(ge=0, le=1 << 46)]
    seconds: Seconds
    cap: Count


class AskArena(Request, tag="arena"):
    """Say what there is of the arena, and give what is free of it."""

    looks = True
    with_free: bool = False


Asked = Put | Get | Drop | Keys | Ping | Segments | Reserve | AskArena


class Arena(msgspec.Struct):
    """What there is of the arena: bytes that are in use (in all, by key), that nobody uses, that are to be there."""

    used: Count
    free: Count
    reserved: Count
    seconds: Seconds  # for how long
    by: Annotated[dict[Word, Count], msgspec.Meta(max_length=MOST_KEYS)]
    inodes: Numbers  # of all segments


class Number(msgspec.Struct):
    """How many."""

    n: Count


class Nothing(msgspec.Struct):
    """It is done."""


class Noted(msgspec.Struct):
    """What a key holds: how many descriptors, and what is to be known about them."""

    note: Note
    n: Count


class Refusal(msgspec.Struct):
    """What it could not do, if anything; ``there`` is false where a key holds nothing."""

    error: Text | None = None
    used: Count = 0
    there: bool = True
