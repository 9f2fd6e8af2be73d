"""``python -m limosa`` is ``limosa``: loads the command line, and answers a Ctrl-C that comes meanwhile."""

from __future__ import annotations

import gc
import os
import signal
import sys
from typing import NoReturn

CANCELLED = 22


def main() -> NoReturn:
    """Run the command line."""
    _open_what_is_closed()
    if sys.argv[1:] == ["--version"]:
        _version()
    # What is loaded stays: to look through it for garbage, twenty times at the start and at the end, costs a quarter of
    # what `limosa --version` takes.
    gc.set_threshold(100_000, 20, 100)
    try:
        _hear_signals()
        from limosa.cli.main import entry
    except KeyboardInterrupt:
        _interrupted(sys.argv[1:])
    entry()


def _version() -> NoReturn:
    """Asked for by scripts, often: answered before the parser of options is loaded."""
    from limosa.version import VERSION

    try:
        os.write(1, f"limosa {VERSION}\n".encode())
    except BrokenPipeError:
        pass  # the reader has gone away
    except OSError as error:
        sys.exit(f"limosa: {error.strerror}")
    sys.exit(0)


def _open_what_is_closed() -> None:
    """A program that has closed stdout must not find its result in the next file that is opened."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest that is free
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115 - as long as the process lives
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def _hear_signals() -> None:
    """What nobody asked for by nohup or ``&``: blocked signals (no Ctrl-C comes through), an ignored SIGCHLD.

    With that one the kernel throws exit codes away, and a CRIU that has failed would look like one that has not. What
    else is ignored stays so: that is how nohup, and a script's ``&``, protect what they start.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _interrupted(arguments: list[str]) -> NoReturn:
    """What is left to say where nothing of Limosa may have been loaded; 22: no job was touched."""
    message = "interrupted before it had begun; no job was touched"
    words = f" {' '.join(arguments)} "
    if any(f" {option} " in words for option in ("-o json", "-ojson", "--format json", "--format=json")):
        import json

        error = {"id": "cancelled", "exit_code": CANCELLED, "message": message, "hint": "", "job_state": ""}
        os.write(1, json.dumps({"schema": 1, "error": error, "warnings": []}).encode() + b"\n")
    os.write(2, f"limosa: {message}\n".encode())
    os._exit(CANCELLED)


if __name__ == "__main__":
    main()
