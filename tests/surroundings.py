"""What tests take over from whoever starts them: nothing that would change what they show.

``nohup make test``, ``make test &``, a cron job and a CI runner hand on ignored signals, blocked signals, a closed
stdin, a umask, limits and variables of their own. ``as_usual`` puts all of these where a login shell has them. The
tests' ``conftest.py`` calls it before anything else, in each process of pytest, and so does the campaign: victims and
``limosa`` processes that they start have it from there.
"""

from __future__ import annotations

import os
import resource
import signal

_FILES = 4096
"""Descriptors a test may rely on, where the hard limit allows so many."""

_DROPPED = (
    *("COLUMNS", "LINES", "FORCE_COLOR", "CLICOLOR_FORCE", "NO_COLOR", "PYTHONOPTIMIZE", "SUDO_UID"),
    *("LIMOSA_RUNTIME_DIR", "LIMOSA_SHIM", "LIMOSA_SHIM_WITHOUT", "LIMOSA_SEES", "LIMOSA_TRACE"),
    *("LIMOSA_ARENA_MAX", "LIMOSA_ARENA_IDLE", "LIMOSA_VAULT_IDLE", "LIMOSA_MOVER_IDLE"),
    *("LIMOSA_DRIVER_IDLE",),
    *("LIMOSA_ANSWER_SECONDS", "LIMOSA_COPY_SECONDS"),
)
"""Variables that change what Limosa does or prints, as somebody may have them set for his own use of it."""


_DEAF = "LIMOSA_TESTS_DEAF"
"""What pytest ignores, by number: for the processes that it starts side by side, which have to ignore it as well."""


def as_usual() -> None:
    """Default signals, none blocked; standard streams that are open; umask 022; limits and variables as usual."""
    _signals()
    _streams()
    os.umask(0o022)
    _limits()
    _variables()


def _signals() -> None:
    """What is ignored goes on being so here, by a handler: whoever hangs up does not end ``nohup make test``.

    A handler ends with exec, where "ignored" would go on: what tests start has every signal at its default.
    """
    ignored = {n for n in signal.valid_signals() if signal.getsignal(n) is signal.SIG_IGN}
    ignored |= {int(word) for word in os.environ.get(_DEAF, "").split()}
    ignored -= {signal.SIGPIPE, signal.SIGXFSZ}  # by Python itself, which undoes it for what it starts
    for number in ignored:
        # An ignored SIGCHLD takes exit codes away.
        signal.signal(number, signal.SIG_DFL if number == signal.SIGCHLD else lambda _number, _frame: None)
    if ignored:
        os.environ[_DEAF] = " ".join(str(int(number)) for number in sorted(ignored))
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _streams() -> None:
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest that is free


def _limits() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    for what in (resource.RLIMIT_FSIZE, resource.RLIMIT_CPU, resource.RLIMIT_AS, resource.RLIMIT_DATA):
        resource.setrlimit(what, (resource.getrlimit(what)[1],) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def _variables() -> None:
    for name in _DROPPED:
        os.environ.pop(name, None)
