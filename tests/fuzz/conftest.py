"""The fixtures of the fuzzers (``frame.py`` says how they are used)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fuzz import frame

SECONDS_A_CASE = 0.05


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Time for as many cases as are asked for; a single one that hangs is interrupted by the frame."""
    for item in items:
        if "fuzz" in item.path.parent.name and frame.count() > 2000:
            item.add_marker(pytest.mark.timeout(120 + frame.count() * SECONDS_A_CASE))


@pytest.fixture
def fuzz() -> frame.Fuzz:
    """``fuzz.cases()``: the cases of this test, each with its limits."""
    return frame.Fuzz()


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """No descriptor, thread or child more after a test than before it."""
    state = frame.Left()
    yield
    state.check()
