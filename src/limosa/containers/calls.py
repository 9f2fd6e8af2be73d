"""One run of a container runtime's own program: podman, runc.

It is found where only root, or whoever installed Limosa, can put it, and gets an environment of ours. What it leaves
behind (podman's monitor of a container) would keep a pipe open, so what it says goes to a file in memory.

Whoever is told of it (``on_start``) may note it before it does anything: until then a shell stands in its place, which
becomes the program at a word of ours, and ends where we do without one. So there is no runtime at work that nobody
knows of: it would freeze a container again that ``recover`` has let go on, or make one that ``recover`` has not found.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO

import msgspec

from limosa import start
from limosa.errors import FailedUndone, LimosaError
from limosa.process.criu.lent import stopped_children
from limosa.process.identity import Identity, read_stat
from limosa.process.slurp import head, slurp
from limosa.process.tree import pids

_CONFIGURATION = ("CONTAINERS_CONF", "CONTAINERS_STORAGE_CONF", "CONTAINERS_REGISTRIES_CONF", "CONTAINERD_ADDRESS")
_MOST_SAID = 8 << 20
_MOST_ARGUMENTS = 1 << 12
_TICK = 0.02
_LOOKS = 10
_TERM_SECONDS = 10.0
_REST_SECONDS = 60.0  # for what a runtime that was killed has started
_SHELL = "/bin/sh"
_WAITS = 'read -r go && exec "$@" </dev/null'


def nobody(_: Identity) -> None:
    """Nobody is told of it."""


def nothing() -> None:
    """Nothing is done meanwhile."""


class Said(msgspec.Struct, frozen=True):
    """How a program ended, and what it said."""

    rc: int
    out: bytes
    err: str

    @property
    def why(self) -> str:
        """The last line of what it complained about."""
        lines = [line for line in self.err.splitlines() if line.strip()]
        return lines[-1].strip() if lines else f"it ended with status {self.rc}"


def settings() -> dict[str, str]:
    """Return by which of the caller's variables runtimes are configured; a file counts only if nobody else changes it.

    Whoever recovers an operation may be called with others.
    """
    return {name: path for name in _CONFIGURATION if (path := os.environ.get(name, "")) and _usable(path)}


def environment(configured: Mapping[str, str], criu_folder: str = "") -> dict[str, str]:
    """Return what a runtime is started with.

    Args:
        configured: what :func:`settings` has said.
        criu_folder: whose ``criu`` it is to use, before any other; "" for the system's.
    """
    made = start.environment(configured)
    if criu_folder:
        made["PATH"] = f"{criu_folder}:{made['PATH']}"
    return made


def _usable(path: str) -> bool:
    return os.path.isabs(path) and start.trusted(path)


def call(  # noqa: PLR0913 - options are keywords
    argv: Sequence[str],
    configured: Mapping[str, str] | None = None,
    *,
    criu_folder: str = "",
    pass_fds: Sequence[int] = (),
    speaks: bool = True,
    output: int = subprocess.DEVNULL,
    ends_early: bool = False,
    on_start: Callable[[Identity], None] = nobody,
    tick: Callable[[], None] = nothing,
) -> Said:
    """Run it to its end, and to the end of what it has started in its session.

    Args:
        argv: the program and its arguments.
        configured: what :func:`settings` has said; None: what it says now.
        criu_folder: as :func:`environment` has it.
        pass_fds: descriptors that it inherits.
        speaks: whether what it says is kept; else its output is what a container may inherit.
        output: a descriptor for that; /dev/null if nothing is said.
        ends_early: whether it may be ended where it works on alone, after ``tick`` has raised.
        on_start: told who it is, before it begins. If that raises, it does not begin.
        tick: called now and then. What it raises is raised once the program has ended; a CRIU that it has started is
            told to write no more.

    Raises:
        FailedUndone: it cannot be started, or what it has started does not end.
    """
    with contextlib.ExitStack() as stack:
        out, err = (stack.enter_context(open(os.memfd_create(name, os.MFD_CLOEXEC), "w+b")) for name in ("out", "err"))
        waits, go = os.pipe()
        stack.callback(os.close, waits)
        held = stack.enter_context(open(go, "wb", buffering=0))
        noted = on_start is not nobody
        try:
            process = start.popen(
                [_SHELL, "-c", _WAITS, argv[0], *argv] if noted else argv,
                env=environment(settings() if configured is None else configured, criu_folder),
                stdin=waits if noted else subprocess.DEVNULL,
                stdout=out if speaks else output,
                stderr=err if speaks else output,
                start_new_session=True,
                pass_fds=pass_fds,
            )
        except OSError as error:
            raise FailedUndone(what=os.path.basename(argv[0]), detail=f"it cannot be started: {error}") from error
        who = Identity(process.pid, read_stat(process.pid).start_time)  # nobody has waited for it yet
        raised = _begin(who, on_start, held) if noted else None
        end_children = stopped_children(criu_folder) if criu_folder else nothing
        raised = _follow(process, raised, ends_early, tick, end_children)
        _wait_for_rest(who, argv[0], end_children)
        if raised is not None:
            raise raised
        return Said(process.returncode, _read(out.fileno()), _read(err.fileno()).decode(errors="replace"))


def _begin(who: Identity, on_start: Callable[[Identity], None], held: IO[bytes]) -> BaseException | None:
    """Have it noted, then let it begin; return what has come instead."""
    try:
        on_start(who)
        with contextlib.suppress(BrokenPipeError):  # it was killed
            held.write(b"go\n")
    except BaseException as error:
        return error
    finally:
        held.close()
    return None


def _follow(
    process: subprocess.Popen[bytes],
    raised: BaseException | None,
    ends_early: bool,
    tick: Callable[[], None],
    end_children: Callable[[], None],
) -> BaseException | None:
    """Wait for its end, whatever comes, or has come; return that."""
    told = 0.0  # when it was told to end
    while True:
        try:
            process.wait(_TICK)
            return raised
        except subprocess.TimeoutExpired:
            pass
        except BaseException as error:
            raised = raised or error
        try:
            end_children()
            if raised is None:
                tick()
        except BaseException as error:
            raised = error
        if raised is not None:
            _stop_writing(process.pid)
            if ends_early and session_of(process.pid) == [process.pid]:
                told = told or _end(process, signal.SIGTERM)
                if time.monotonic() - told > _TERM_SECONDS:
                    _end(process, signal.SIGKILL)


def _end(process: subprocess.Popen[bytes], number: signal.Signals) -> float:
    """Have a program end that does nothing but write what a container has; return when that was."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(number)
    return time.monotonic()


def session_of(leader: int) -> list[int]:
    """Return the processes of a session.

    Args:
        leader: the pid that it began with.
    """
    found = []
    for pid in pids():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getsid(pid) == leader:
                found.append(pid)
    return found


def command_lines() -> Iterator[tuple[int, list[str]]]:
    """Yield the processes of root's, and of the caller's, each with the words that it was started with."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{pid}").st_uid in (0, os.geteuid()):
                words = head(f"/proc/{pid}/cmdline", _MOST_ARGUMENTS).split(b"\0")
                yield int(pid), [os.fsdecode(word) for word in words]


def settle(leader: Identity, seconds: float, tick: Callable[[], None] = nothing) -> bool:
    """Wait until all processes of a session have ended; return whether they have.

    Args:
        leader: who it began with. Where its pid is another's by now, none of them is left.
        seconds: how long, at most.
        tick: called now and then.
    """
    end = time.monotonic() + seconds
    while not _is_anothers(leader) and any(_lives(pid) for pid in session_of(leader.pid)):
        if time.monotonic() > end:
            return False
        tick()
        time.sleep(_TICK)
    return True


def _is_anothers(identity: Identity) -> bool:
    try:
        return read_stat(identity.pid).start_time != identity.start_time
    except LimosaError:
        return False


def _lives(pid: int) -> bool:
    try:
        return not read_stat(pid).ended
    except LimosaError:
        return False


def _wait_for_rest(leader: Identity, program: str, end_children: Callable[[], None]) -> None:
    if not settle(leader, _REST_SECONDS, end_children):
        left = ", ".join(map(str, session_of(leader.pid)))
        raise FailedUndone(what=os.path.basename(program), detail=f"it has ended, and processes {left} have not")


def _stop_writing(leader: int) -> None:
    """Have a dump of CRIU's fail at its next write: it undoes what it has done.

    One that waits for a thread which does not notice that it is attached to writes nothing more, and is ended.
    """
    for pid in session_of(leader):
        with contextlib.suppress(OSError):
            if b"\0swrk\0" in head(f"/proc/{pid}/cmdline", _MOST_ARGUMENTS):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, 0))
                if all(_attaches(pid) for _ in range(_LOOKS)):
                    os.kill(pid, signal.SIGKILL)


def _attaches(pid: int) -> bool:
    time.sleep(_TICK)
    return slurp(f"/proc/{pid}/wchan").strip() == b"ptrace_attach"


def _read(fd: int) -> bytes:
    return os.pread(fd, _MOST_SAID, 0)
