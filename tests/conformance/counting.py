"""How many checks there are: a check is a distinct call, state and class of argument.

The same assertion over many values counts once, whatever it is repeated for: numbers, names of attributes, GPUs, the
same or swapped GPUs after a cycle. So what pytest calls a test is often a value of a check.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

# Parameters that are values, or the answer that a value has: they do not make another check.
VALUES = {
    *("asked", "block", "byte", "can", "code", "contexts", "count", "device", "element", "expected", "flags"),
    *("follows", "given", "gpu", "grid", "height", "key", "name", "offset", "option", "order", "ordinal", "place"),
    *("regions", "result", "rich", "size", "status", "stream", "thread", "times", "timeout_ms", "told", "value"),
    *("version", "visible", "waits", "width", "words"),
}


def count(items: Iterable[pytest.Item]) -> int:
    """The checks among collected tests."""
    return len({_check(item) for item in items if "test_lists.py" not in item.nodeid})


def _check(item: pytest.Item) -> tuple[str, ...]:
    callspec = getattr(item, "callspec", None)
    given = callspec.params if callspec else {}
    return (item.nodeid.partition("[")[0], *(f"{name}={given[name]!r}" for name in sorted(given.keys() - VALUES)))
