"""``recover`` by root, of what users' operations left: each user's own Limosa does it, with that user's rights.

A user's journal is his word, and root's rights are not used to act on it. The process that acts on it is his: he may
stop it, trace it, or let it run for ever. So root starts one for each user, all side by side, waits a short while for
all of them, and goes on. Those that are not done by then go on in the background, as their users' own matter.
"""

from __future__ import annotations

import itertools
import operator
import subprocess
import time
from collections.abc import Sequence

from limosa import start
from limosa.errors import FailedUndone, LimosaError
from limosa.operation import journal
from limosa.operation.jobs import user_name
from limosa.operation.journal import Summary
from limosa.operation.results import Recovered
from limosa.process import belief
from limosa.process.identity import read_stat

SECONDS = 10.0
"""For which root waits, for all users together."""
_MOST_USERS, _MOST_TOLD = 16, 20  # users at a time, operations of each that are told of
_BUSY, _UNDO_FAILED, _LEFT_SUSPENDED = 19, 40, 41


def recover_users(left: Sequence[Summary], *, dry_run: bool = False) -> list[Recovered]:
    """Have each user's operations finished or undone by that user: an entry for each of these journals of others."""
    owner = operator.attrgetter("owner")
    by_user = {uid: list(mine) for uid, mine in itertools.groupby(sorted(left, key=owner), owner)}
    if dry_run:
        told = [s for mine in by_user.values() for s in mine[:_MOST_TOLD]]
        return [_entry(s, did=f"would have uid {s.owner} finish or undo: {s.text}") for s in told]
    end = time.monotonic() + SECONDS
    started = {uid: _start(uid) for uid in itertools.islice(by_user, _MOST_USERS)}
    waited = {uid: one for uid, one in started.items() if isinstance(one, subprocess.Popen)}
    while any(one.poll() is None and not _stopped(one.pid) for one in waited.values()) and time.monotonic() < end:
        time.sleep(0.02)
    found = []
    for uid, mine in by_user.items():
        try:
            there = {name for _, name in belief.named(journal.KIND, uid)}
        except FailedUndone:  # nobody can say: then it is as it was
            there = {f"{summary.id}.jsonl" for summary in mine}
        for summary in mine[:_MOST_TOLD]:
            found.append(_what_came_of(summary, started.get(uid), left=f"{summary.id}.jsonl" in there))
    return found


def _entry(summary: Summary, **more: str | int) -> Recovered:
    pid = summary.pids[0] if summary.pids else 0
    who = user_name(summary.owner)
    return Recovered(kind="operation", id=summary.id, operation=summary.operation, pid=pid, user=who, **more)  # type: ignore[arg-type]


def _start(uid: int) -> subprocess.Popen[bytes] | str:
    """Starts a user's ``recover``; why it cannot be started where it cannot."""
    try:
        # The user owns what runs: he may read its environment, and write to a terminal that it has. It becomes his by
        # itself: he could stop our own copy before that, and look into it.
        return start.popen(
            start.python("limosa.operation.orphan", "--as", str(uid)),
            env=start.environment(for_user=True), start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        return f"uid {uid} cannot run limosa here: {error}"


def _stopped(pid: int) -> bool:
    try:
        return read_stat(pid).state in "Tt"
    except LimosaError:
        return False


def _what_came_of(summary: Summary, started: subprocess.Popen[bytes] | str | None, *, left: bool) -> Recovered:
    who = f"uid {summary.owner}"
    if not left:
        return _entry(summary, did=f"{who} has finished or undone it")
    if started is None:
        return _entry(summary, error="so many users have left something: try again", exit_code=_BUSY)
    if isinstance(started, str):
        return _entry(summary, error=started, exit_code=_UNDO_FAILED)
    if started.returncode is None:
        text = f"{who} has not finished or undone it in {SECONDS:g} s: process {started.pid}, which is that user's, "
        return _entry(summary, error=text + ("is stopped" if _stopped(started.pid) else "is at it"), exit_code=_BUSY)
    code = started.returncode if started.returncode == _LEFT_SUSPENDED else _UNDO_FAILED
    return _entry(summary, error=f"limosa recover, as {who}, ended with {started.returncode}", exit_code=code)
