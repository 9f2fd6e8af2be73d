"""One operation's connections to vaults and movers: those of the users whose jobs it works on."""

from __future__ import annotations

from collections.abc import Sequence

from limosa.parking.mover import Mover
from limosa.parking.vault import Vault


class Residents:
    """Connects when first asked for; one of each kind a user."""

    def __init__(self) -> None:
        self._vaults: dict[int, Vault] = {}
        self._movers: dict[int, Mover] = {}

    def vault(self, owner: int) -> Vault:
        """Return the vault of a job's owner.

        Raises:
            FailedUndone: it cannot be started, or does not answer.
        """
        if owner not in self._vaults:
            self._vaults[owner] = Vault(owner)
        return self._vaults[owner]

    def mover(self, owner: int) -> Mover:
        """Return the mover of a job's owner.

        Raises:
            FailedUndone: it cannot be started.
        """
        if owner not in self._movers:
            self._movers[owner] = Mover(owner)
        return self._movers[owner]

    def put(self, owner: int, key: str, fds: Sequence[int], note: bytes = b"") -> None:
        """Have descriptors held for a job of that owner under a key, instead of what it held; ours stay ours."""
        self.vault(owner).put(key, fds, note)

    def get(self, owner: int, key: str) -> tuple[list[int], bytes]:
        """Return descriptors, which are the caller's to close, and the note.

        Raises:
            KeyError: nothing is held under that key.
        """
        return self.vault(owner).get(key)

    def drop(self, owner: int, key: str, *, again: bool = False) -> None:
        """Have a key let go of; ``again`` as :meth:`Vault.drop` has it."""
        self.vault(owner).drop(key, again=again)

    def close(self) -> None:
        """End the connections; what movers held for us is let go of."""
        for mover in self._movers.values():
            mover.close()
        for vault in self._vaults.values():
            vault.close()
        self._movers.clear()
        self._vaults.clear()
