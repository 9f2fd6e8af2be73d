"""One operation's connections to vaults and movers: those of the users whose jobs it works on."""

from __future__ import annotations

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

    def close(self) -> None:
        """End the connections; what movers held for us is let go of."""
        for mover in self._movers.values():
            mover.close()
        for vault in self._vaults.values():
            vault.close()
        self._movers.clear()
        self._vaults.clear()
