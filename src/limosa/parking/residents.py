"""One operation's connections to vaults and movers: those of the users whose jobs it works on.

Both hold the descriptors of a job's memory, so that with any one of the two and limosa killed the bytes are still
there. Either may be killed and started again in the middle: a connection that is lost is made anew, once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from limosa.errors import FailedUndone, LimosaError
from limosa.parking.mover import Mover
from limosa.parking.vault import Vault

_T = TypeVar("_T")


class Residents:
    """Connects when first asked for; one of each kind a user."""

    def __init__(self) -> None:
        self._vaults: dict[int, Vault] = {}
        self._movers: dict[int, Mover] = {}

    def vault(self, owner: int) -> Vault:
        """Return the vault of a job's owner. Raises FailedUndone: it cannot be started, or does not answer."""
        if owner not in self._vaults:
            self._vaults[owner] = Vault(owner)
        return self._vaults[owner]

    def mover(self, owner: int) -> Mover:
        """Return the mover of a job's owner. Raises FailedUndone: it cannot be started."""
        if owner not in self._movers:
            self._movers[owner] = Mover(owner)
        return self._movers[owner]

    def put(self, owner: int, key: str, fds: Sequence[int], note: bytes = b"", *, mover: bool = True) -> None:
        """Have both hold descriptors under a key, with a note, instead of what it held; ours stay ours.

        Without ``mover`` the vault alone holds them: what is held for long keeps a mover from ending. Raises
        FailedUndone: one of them does not.
        """
        self._of_vault(owner, lambda vault: vault.put(key, fds, note))
        if mover:
            self.mover(owner).put(key, fds, note)

    def segments(self, owner: int, key: str, bytes_: int, cap: int) -> list[int]:
        """Return segments of the arena, held as that key from now on; see :meth:`Vault.segments`.

        Raises NoRoomOnHost: it may not grow so far; FailedUndone: the vault does not answer.
        """
        return self._of_vault(owner, lambda vault: vault.segments(key, bytes_, cap))

    def get(self, owner: int, key: str) -> tuple[list[int], bytes]:
        """Return descriptors, which are the caller's to close, and the note, from whoever of the two has them.

        Raises KeyError: both have said that they hold nothing so; FailedUndone: one could not be asked, and the other
        has nothing.
        """
        unasked: LimosaError | None = None
        try:
            return self._of_vault(owner, lambda vault: vault.get(key))
        except KeyError:
            pass
        except LimosaError as error:
            unasked = error
        try:
            with contextlib.ExitStack() as open_:
                movers, silent = Mover.all_of(owner)
                unasked = silent or unasked
                for mover in [open_.enter_context(one) for one in movers]:
                    try:
                        return mover.get(key)
                    except KeyError:
                        pass
                    except LimosaError as error:
                        unasked = error
        except LimosaError as error:
            unasked = error
        if unasked is not None:
            raise unasked
        raise KeyError(key)

    def drop(self, owner: int, key: str, *, again: bool = False) -> None:
        """Have both let go of a key; who is not there holds nothing. ``again`` as :meth:`Vault.drop` has it.

        Never raises: what they hold of a process that has ended they let go of themselves.
        """
        with contextlib.suppress(LimosaError):
            self.mover(owner).unput(key)
        with contextlib.suppress(LimosaError):
            self._of_vault(owner, lambda vault: vault.drop(key, again=again))

    def missing(self, owner: int, wanted: Mapping[str, int]) -> set[str]:
        """Return which of these keys one of the two has not so many descriptors of: it was killed meanwhile.

        Raises FailedUndone: one of them does not answer.
        """
        vault, mover = self._of_vault(owner, lambda vault: vault.held()), self.mover(owner).held()
        return {key for key, n in wanted.items() if vault.get(key) != n or mover.get(key) != n}

    def _of_vault(self, owner: int, call: Callable[[Vault], _T]) -> _T:
        try:
            return call(self.vault(owner))
        except FailedUndone:
            if not self._lost(owner):
                raise
        try:
            return call(self.vault(owner))
        except FailedUndone:
            self._lost(owner)
            raise

    def _lost(self, owner: int) -> bool:
        """Whether the connection to a vault is of no use any more; it is closed then."""
        vault = self._vaults.get(owner)
        if vault is None or not vault.lost:
            return False
        self._vaults.pop(owner).close()
        return True

    def close(self) -> None:
        """End the connections; what movers had mapped for us is let go of, what they hold is not."""
        for mover in self._movers.values():
            mover.leave()
        for vault in self._vaults.values():
            vault.close()
        self._movers.clear()
        self._vaults.clear()
