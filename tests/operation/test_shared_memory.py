"""Memory that several processes have, where one of them has nothing that is parked."""

from __future__ import annotations

from typing import Any

import pytest

from limosa.errors import CannotBeMoved
from limosa.operation.parked import shares
from limosa.parking.answers import Memory


class OneShim:
    """A process's shim, as far as it is asked here."""

    def __init__(self, owner: int = 0, shares: tuple[int, ...] = (), sharers: dict[int, set[int]] | None = None):
        self._sharers = sharers or {}
        self._memories = [
            Memory(id=i + 1, bytes=1 << 21, device=0, owner=owner, share=one) for i, one in enumerate(shares)
        ]

    def memories(self) -> list[Memory]:
        return self._memories

    def sharers(self) -> dict[int, set[int]]:
        return self._sharers


@pytest.mark.parametrize("owner", [10, 20])
def test_what_one_that_is_held_still_alone_shares_does_not_go(owner: int) -> None:
    """Parked it would be one memory for the first, and another one for the second."""
    first: Any = OneShim(owner if owner == 20 else 0, (7,), {7: {20}} if owner == 10 else {})
    second: Any = OneShim(owner if owner == 10 else 0, (7,))
    with pytest.raises(CannotBeMoved, match="shares device memory with process 20, which does not take part"):
        shares.refuse_outside({10: first}, {20: second})
    shares.refuse_outside({10: first, 20: second})  # both take part
    shares.refuse_outside({10: first}, {20: OneShim()})  # type: ignore[dict-item] # it has let go of it
