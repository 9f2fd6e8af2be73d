"""The same call for several processes: all at once, or for each one even if others fail."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial

from limosa.errors import NoSuchProcess
from limosa.operation.journal import Member
from limosa.process.identity import has_gone


def together(calls: Sequence[Callable[[], object]]) -> None:
    """Makes calls at once; every one is waited for, then the first error is raised."""
    errors: list[BaseException] = []

    def run(call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def each(calls: Sequence[tuple[Member, Callable[[], object]]]) -> None:
    """Does something for each process, whatever comes of the others; one that has ended needs nothing.

    Raises LimosaError: the first that failed.
    """
    failed: list[BaseException] = []
    for member, call in calls:
        _do(member, call, failed)
    if failed:
        raise failed[0]


def each_at_once(calls: Sequence[tuple[Member, Callable[[], object]]]) -> None:
    """The same side by side: one that takes its time keeps no other waiting."""
    failed: list[BaseException] = []
    together([partial(_do, member, call, failed) for member, call in calls])
    if failed:
        raise failed[0]


def _do(member: Member, call: Callable[[], object], failed: list[BaseException]) -> None:
    try:
        call()
    except NoSuchProcess:
        pass
    except BaseException as error:
        if member.identity.alive() and not has_gone(member.pid):
            failed.append(error)
