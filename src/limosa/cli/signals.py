"""Ctrl-C, SIGTERM and SIGHUP cancel the operation; a second Ctrl-C stops now and says what is where.

A driver call or CRIU under way cannot be broken off, so a cancelled operation waits for it and then undoes. The
operation itself knows nothing of signals: it is given an event and looks at it between steps.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

from limosa.cli.output import Report, error_object
from limosa.cli.state import whereabouts

_WAITING = (
    "undoing what was done, unless it is all but finished. A driver\n"
    "limosa: call or CRIU under way cannot be broken off; waiting for it.\n"
    "limosa: Ctrl-C once more stops at once."
)
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def cancelling(report: Report, waiting: str = _WAITING) -> Iterator[threading.Event]:
    """Yield the event to give to an operation as ``cancel=``; the signals set it while the block runs.

    After the block Ctrl-C is ignored: it is too late for it.

    Args:
        report: the verb's; told what is where at a second Ctrl-C.
        waiting: said at the first signal, after its name; "" where the error says it all.
    """
    event = threading.Event()

    def on_signal(number: int, _frame: FrameType | None) -> None:
        if event.is_set():
            # Only a second Ctrl-C: a closing terminal sends SIGHUP and SIGTERM one after the other.
            if number == signal.SIGINT:
                _stop_now(report)
            return
        event.set()
        _write(f"\nlimosa: {signal.Signals(number).name}: {waiting}\n" if waiting else "\n")

    # A signal that is ignored (nohup) stays ignored.
    before: dict[signal.Signals, Any] = {}
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, on_signal)
    try:
        yield event
    finally:
        for number, handler in before.items():
            # All that is left is to say what became of it, and to end with that code: a Ctrl-C that came now would say
            # "interrupted, no job was touched" of an operation that is done.
            over = signal.SIG_IGN if number == signal.SIGINT else handler
            signal.signal(number, over if over is not None else signal.SIG_DFL)


def _stop_now(report: Report) -> NoReturn:
    """Tell what is where and leave without undoing; what lives on (worker, CRIU) notices and undoes."""
    # An impatient third one must not interrupt this: handlers within handlers would run out of stack.
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    import msgspec

    from limosa.errors import LimosaError

    try:
        report.close()
    except Exception:
        pass
    state, text = whereabouts()
    error = LimosaError(
        f"limosa {report.verb} was stopped before it could undo; {text}", hint="limosa recover", job_state=state
    )
    if report.json:
        found = {"schema": 1, "error": {**error_object(error), "id": "stopped"}, "warnings": []}
        _write(msgspec.json.encode(found).decode() + "\n", fd=1)
    _write(f"\nlimosa: {error.message}\nlimosa: hint: {error.hint}\n")
    os._exit(error.exit_code)


def _write(text: str, fd: int = 2) -> None:
    """Write past Python's buffers: a handler may have interrupted a write to them."""
    try:
        os.write(fd, text.encode())
    except OSError:
        pass  # the terminal may be what has gone away
