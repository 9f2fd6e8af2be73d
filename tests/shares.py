"""What ``make test`` runs of tests that take long: each, but a quarter of its variants, others at each commit.

``LIMOSA_SHARE=2/4`` says which quarter. A test that has one variant is always run, and so are all of one that is marked
``whole``. Four commits one after the other run all; ``make test-all`` does so at once.
"""

from __future__ import annotations

import re
import zlib

import pytest


class Shares:
    """A plugin that leaves out what is in other shares than "K/N"."""

    def __init__(self, share: str):
        found = re.fullmatch(r"([1-9])/([1-9])", share)
        if found is None or int(found[1]) > int(found[2]):
            raise pytest.UsageError(f"LIMOSA_SHARE={share!r}: a share is 1/4, say")
        self.share, self._number, self._of = share, int(found[1]) - 1, int(found[2])

    @pytest.hookimpl(trylast=True)  # what -m and -k leave has variants
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        variants: dict[str, list[pytest.Item]] = {}
        for item in items:
            variants.setdefault(item.nodeid.partition("[")[0], []).append(item)
        kept = {item for name, those in variants.items() for item in self.of(name, those)}
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]

    def of(self, name: str, variants: list[pytest.Item]) -> list[pytest.Item]:
        """Those of a test's variants that are in this share: every fourth, say, and one at least."""
        if variants[0].get_closest_marker("whole"):
            return variants
        first = (zlib.crc32(name.encode()) + self._number) % self._of  # the first variants are not all in one share
        return variants[first :: self._of] or [variants[first % len(variants)]]
