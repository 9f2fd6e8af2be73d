"""Processes under the shim that are held still, and no more: the driver carries what they have.

While the driver has checkpointed a process each synchronise in it ends it (measured: docs/caveats.md). The shim's gate
keeps threads from that. So it is closed as well where there is nothing to park, or where the parked way is not open.
"""

from __future__ import annotations

from collections.abc import Sequence

from limosa.operation.parked.carrier import Beside, Connected, Process
from limosa.operation.work import Work


class Still(Beside[Process]):
    """Held still until the driver is done.

    Args:
        work, others: as :class:`Beside` takes them.
        stays: of a suspend, or an image: the driver still has them when the memory of others has arrived.
    """

    def __init__(self, work: Work, others: Sequence[Connected], *, stays: bool):
        super().__init__(work, others)
        self._stays = stays

    def prepare(self) -> None:
        """Nothing: nothing goes anywhere."""

    def hold(self) -> None:
        """Closes the gates."""
        with self._work.spent("gate"):
            self._close_gates([])

    def copy(self) -> None:
        """Nothing."""

    def arrive(self) -> None:
        """Puts stack limits back, where the job is to go on."""
        if not self._stays:
            self._stacks_back()
