"""How many descriptors this process may have open, while it works on jobs: one for each piece of device memory."""

from __future__ import annotations

import contextlib
import resource
import threading
from collections.abc import Iterator

_lock = threading.Lock()
_users = 0
_before = (0, 0)


@contextlib.contextmanager
def many_descriptors() -> Iterator[None]:
    """Let this process have as many open as it may; afterwards its limit is what it was.

    Programs that are started later have the limit that their caller had, not ours. Also usable as a decorator.

    Example:
        >>> before = resource.getrlimit(resource.RLIMIT_NOFILE)
        >>> with many_descriptors():
        ...     soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        >>> soft == hard and resource.getrlimit(resource.RLIMIT_NOFILE) == before
        True
    """
    global _users, _before
    with _lock:
        if not _users:
            _before = resource.getrlimit(resource.RLIMIT_NOFILE)
            _set(_before[1])
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users and resource.getrlimit(resource.RLIMIT_NOFILE) == (_before[1], _before[1]):
                _set(_before[0])


def _set(soft: int) -> None:
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, _before[1]))
