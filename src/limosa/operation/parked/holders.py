"""The names of an operation's descriptors in vault and mover, which hold them, and how they are found again."""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Callable, Sequence
from typing import Annotated, TypeVar

import msgspec

from limosa.errors import FailedUndone, LimosaError
from limosa.ipc.messages import Count, Word
from limosa.ipc.packet import close_all
from limosa.ipc.side_by_side import SECONDS, within
from limosa.operation.journal import Member
from limosa.parking.mover import Mover
from limosa.parking.residents import Residents
from limosa.parking.vault import Vault
from limosa.process import belief
from limosa.structs import ready

_OPERATION = re.compile(r"[a-z]+-\d+-[0-9a-f]+")
_JOURNALS = "journals"
_R = TypeVar("_R", Mover, Vault)


class LostMemory(LimosaError):
    """All that held a process's device memory have ended."""

    id, exit_code = "lost-memory", 40
    template = "nobody has the device memory of process {pid} any more: vault, mover and limosa have all ended"
    hint_template = "end it: nothing can bring it back"


_LONGEST = 120
"""Bytes of what is noted of one piece."""


class Held(msgspec.Struct, array_like=True, frozen=True):
    """A piece of a process's memory that is held: its number there, its size, and the GPU that it is on."""

    id: Annotated[int, msgspec.Meta(ge=0)]
    bytes: Count
    gpu: Word


ARENA = "arena"
"""The side of suspended jobs' arenas, which they let go of while CRIU dumps them."""


def key_of(operation: str, member: Member, side: str) -> str:
    """What one side's memory of a process is called."""
    return f"{operation}/{side}/{member.identity.to_str()}"


def aside_key(member: Member) -> str:
    """What the vault calls a process's arena."""
    return f"aside/{member.identity.to_str()}"


def get(member: Member, owner: int, key: str) -> tuple[list[int], list[Held]]:
    """Return what vault or mover hold under a key; the descriptors are the caller's to close.

    Raises LostMemory: both have said that they do not have it; FailedUndone: one of them could not be asked, or says
    something else.
    """
    try:
        with contextlib.closing(Residents()) as residents:
            fds, note = residents.get(owner, key)
    except KeyError:
        raise LostMemory(pid=member.pid) from None
    try:
        if len(note) > _LONGEST * (len(fds) + 1):  # decoded it is many times as large
            raise FailedUndone(f"what is noted of {len(fds)} pieces of process {member.pid} is too long")
        pieces = msgspec.json.decode(note, type=ready(list[Held]))
        if len(pieces) != len(fds):
            raise FailedUndone(f"what is held of process {member.pid} are {len(fds)} of {len(pieces)} pieces")
    except msgspec.MsgspecError as error:
        close_all(fds)
        raise FailedUndone(f"what is held of process {member.pid} cannot be understood ({error})") from error
    except BaseException:
        close_all(fds)
        raise
    return fds, pieces


def forget(operation: str, *, but: str | None = None, of: Sequence[Member] = ()) -> None:
    """Have everybody let go of what they hold for an operation (not jobs' own arenas): all sides, or all ``but`` one.

    With ``of``, processes that live, who may hold something for them has to be told: raises FailedUndone where one of
    the caller's own could not be. Without any, everybody is told who answers: what is held of a process that has ended
    they let go of themselves.
    """
    _forget(lambda _, id_, side: id_ == operation and side != but, of)


def forget_arenas(members: Sequence[Member]) -> None:
    """Have vaults let go of arenas that these processes, which run, have no need of.

    Raises FailedUndone: the caller's own vault, which may hold one, could not be told.
    """
    keys = {aside_key(member) for member in members}

    def of_one(vault: Vault) -> None:
        for key in keys & vault.held().keys():
            vault.drop(key)

    for uid in _owners(members):
        _tell_all_of(Vault, uid, of_one)


def forget_finished() -> None:
    """Have everybody let go of what they hold for operations that have no journal any more: those are over.

    The journals are looked at after what is held was listed: an operation has a journal before it has anything held.
    What a user's vault holds is for operations of his, or of root's.
    """

    def over(uid: int, id_: str, _: str) -> bool:
        return not any((owner, f"{id_}.jsonl") in belief.named(_JOURNALS, owner) for owner in {uid, 0})

    _forget(over)


def _forget(meant: Callable[[int, str, str], bool], of: Sequence[Member] = ()) -> None:
    """Has everybody let go of what is meant; other users' residents for as long as they answer at once."""

    def of_one(one: Mover | Vault) -> None:
        for key in _keys(one.uid, one.held(), meant):
            if isinstance(one, Mover):
                one.unput(key)
            else:
                one.drop(key)

    for uid in _owners(of):
        _tell_all_of(Mover, uid, of_one)
        _tell_all_of(Vault, uid, of_one)
    if not of:
        _tell(Mover.all(), of_one)
        _tell(Vault.all(), of_one)


def _owners(members: Sequence[Member]) -> set[int]:
    """The users of those that live."""
    found: set[int] = set()
    for member in members:
        with contextlib.suppress(LimosaError, OSError):
            found |= belief.owners_of(member.pid)
    return found


def _tell_all_of(kind: type[_R], uid: int, tell: Callable[[_R], None]) -> None:
    """Tells each resident of a user something; another user's for as long as they answer at once.

    Raises where one of the caller's own could not be told: what another user's holds on to is that user's alone.
    """

    def told() -> LimosaError | None:
        residents, silent = kind.all_of(uid)
        for one in residents:
            try:
                with one:
                    tell(one)
            except LimosaError as error:
                silent = silent or error
        return silent

    if uid != os.geteuid():
        within(SECONDS, [told])
    elif (silent := told()) is not None:
        raise FailedUndone(f"what is held for it is held on: {silent}") from silent


def _tell(residents: Sequence[_R], tell: Callable[[_R], None]) -> None:
    """Tells each resident something: other users' side by side, for as long as they answer at once."""

    def of_one(one: _R) -> None:
        with contextlib.suppress(LimosaError), one:
            tell(one)

    theirs = []
    for one in residents:
        if one.uid == os.geteuid():
            of_one(one)
        else:
            theirs.append(functools.partial(of_one, one))
    within(SECONDS, theirs)


def _keys(uid: int, held: dict[str, int], meant: Callable[[int, str, str], bool]) -> list[str]:
    named = {key: [*key.split("/"), ""][:2] for key in held}
    return [key for key, (id_, side) in named.items() if _OPERATION.fullmatch(id_) and meant(uid, id_, side)]
