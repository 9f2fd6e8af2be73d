"""Starts a job so that it can be checkpointed: own session, no terminal, no pipes, output on a file, no io_uring."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import signal
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from limosa.errors import CommandNotExecutable, CommandNotFound, Reason, RunFailed
from limosa.process import exit_code
from limosa.process.identity import Identity
from limosa.start import environment, real_path, sudo_user

_TRAMPOLINE = Path(__file__).with_name("trampoline.py")
_KEPT = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)  # what nohup, and a script's &, ignore for what they start
_LOGS = 10_000  # of one name in one folder
_ABOVE = 64  # sources are moved up here first, so that filling 0..4 never overwrites one of them


class Launched(msgspec.Struct, frozen=True):
    """A job that has just been started.

    Attributes:
        identity: its process.
        log: absolute path of the file that its standard output and error go to.
        log_start: size of that file before, in bytes: its output begins here.
        warnings: what the user should know (no_new_privs).
    """

    identity: Identity
    log: str
    log_start: int
    warnings: tuple[Reason, ...] = ()


class Log(NamedTuple):
    """A job's log, open.

    Attributes:
        fd: open for appending; the caller's to close.
        path: absolute.
        new: whether the file was made just now.
    """

    fd: int
    path: Path
    new: bool


def open_log(path: str | os.PathLike[str]) -> Log:
    """Opens a job's log the way CRIU can follow its growth (O_WRONLY | O_APPEND), new ones with mode 0600.

    Root does not append to another user's file, because that user could read along.

    Raises:
        RunFailed: it cannot be opened, or is not a regular file; for root, it is another user's, or is or lies behind
            a link of his.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK
    new = False
    try:
        place = log_place(path)
        with log_folder(place) as folder:
            try:
                fd, new = os.open(place.name, flags | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder), True
            except FileExistsError:
                fd = _open_there(place.name, flags, folder)
    except OSError as e:
        raise RunFailed(
            detail=f"cannot open the log {os.fspath(path)}: {e.strerror}", hint="limosa run --log FILE, a new one"
        ) from e
    os.set_blocking(fd, True)
    return Log(fd, place, new)


def _open_there(name: str, flags: int, folder: int) -> int:
    """Opens a log that is there already; for root one that is root's, by a name that is its only one.

    Raises:
        OSError: it cannot be opened, or is none.
    """
    root = os.geteuid() == 0
    if not root:
        flags |= os.O_CREAT  # through a link of one's own to what is not there yet
    fd = os.open(name, flags | (os.O_NOFOLLOW if root else 0), 0o600, dir_fd=folder)
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        if not root:
            return fd
        if info.st_uid not in (0, sudo_user()):
            raise OSError(errno.EPERM, f"it is a file of uid {info.st_uid}'s, who would read what root's job writes")
        refuse_other_names(fd, name, folder)
    except BaseException:
        os.close(fd)
        raise
    return fd


def refuse_other_names(fd: int, name: str, folder: int) -> None:
    """See that a file that was opened by a name has no other: it may be one of root's, in a user's folder.

    Raises:
        OSError: it has.
    """
    links = os.fstat(fd).st_nlink
    # The second question comes after the first: a name that is still there now was one of the names counted.
    place = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), name)
    if links != 1 or os.readlink(f"/proc/self/fd/{fd}") != place:
        raise OSError(errno.EMLINK, "it has another name, which may be of a file of root's")


def log_place(path: str | os.PathLike[str]) -> Path:
    """Where a log is to be, absolute: for root what links lead to, of which none is another user's.

    Raises:
        OSError: one is.
    """
    found = os.path.abspath(path) if os.geteuid() != 0 else real_path(os.path.abspath(path))
    if found is None:
        raise OSError(errno.ELOOP, "it is, or its folder is, behind a symbolic link of another user's")
    return Path(found)


@contextlib.contextmanager
def log_folder(path: str | os.PathLike[str]) -> Iterator[int]:
    """The folder that a log is in, open: for root one to which no link of another user's leads.

    Raises:
        OSError: it cannot be opened.
    """
    fd = _open_folder(os.path.dirname(os.path.abspath(path)))
    try:
        yield fd
    finally:
        os.close(fd)


def _open_folder(place: str) -> int:
    """A folder, open (O_PATH): for root one to which no link of another user's leads.

    Raises:
        OSError: it cannot be opened.
    """
    fd = os.open(place, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if os.geteuid() == 0 and os.readlink(f"/proc/self/fd/{fd}") != real_path(place):
            raise OSError(errno.ELOOP, "its folder is behind a symbolic link of another user's")
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_new_log(name: str, place: Path, folder: int) -> Log:
    """Makes the log of a job that was named none: ``NAME.limosa.log``; ``NAME.limosa.2.log`` where that is there.

    The file is always a new one: what is there already may be the program's own, and its contents somebody's results.

    Args:
        name: the job's.
        place: the folder's absolute path.
        folder: that folder, open.

    Raises:
        RunFailed: it cannot be made.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    for number in range(1, _LOGS + 1):
        path = place / (f"{name}.limosa.log" if number == 1 else f"{name}.limosa.{number}.log")
        try:
            return Log(os.open(path.name, flags, 0o600, dir_fd=folder), path, new=True)
        except FileExistsError:
            continue
        except OSError as e:
            raise RunFailed(detail=f"cannot make the log {path}: {e.strerror}", hint="limosa run --log FILE") from e
    raise RunFailed(detail=f"{place} has {_LOGS} logs of {name}", hint="remove old ones, or limosa run --log FILE")


def launch(
    command: Sequence[str],
    log: str | os.PathLike[str] | None,
    cwd: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    *,
    name: str = "job",
    seccomp: bool = True,
    detach: bool = False,
) -> Launched:
    """Starts ``command`` and returns once it has been exec'ed.

    The job is in a session of its own, with stdin /dev/null, stdout and stderr appended to ``log``, no other
    descriptor, no blocked or handled signal, PYTHONUNBUFFERED=1, and (``seccomp``) ``io_uring_setup`` answered with
    ENOSYS. Of the signals that the caller ignores it ignores SIGHUP, SIGINT and SIGQUIT, as it would without us: that
    is how nohup, and a script that puts a command in the background, protect it. All others are at their default.

    Args:
        command: argument vector; the first is searched for in the job's PATH.
        log: file for its output, made (0600) where missing; None: a new one, called after ``name``.
        name: the job's name.
        cwd: its working folder, else the caller's.
        env: its environment, else the caller's; PYTHONUNBUFFERED=1 is added.
        seccomp: answer io_uring_setup with ENOSYS.
        detach: let init be its parent. Otherwise it is the caller's child, and the caller must ``waitpid`` it.

    Raises:
        CommandNotFound: there is no such program.
        CommandNotExecutable: it cannot be executed.
        RunFailed: anything else: the log, the folder, the filter.
    """
    job_env = {**(os.environ if env is None else env), "PYTHONUNBUFFERED": "1"}
    ignored = [int(number) for number in _KEPT if signal.getsignal(number) is signal.SIG_IGN]
    spec = {"command": list(command), "env": job_env, "seccomp": seccomp, "detach": detach}
    spec["ignored"] = ignored
    with contextlib.ExitStack() as stack:

        def own(fd: int) -> int:
            stack.callback(os.close, fd)
            return fd

        folder = own(_working_folder(cwd))
        kept = (
            open_log(log) if log is not None else open_new_log(name, Path(os.path.abspath(cwd or os.getcwd())), folder)
        )
        own(kept.fd)
        log_start = os.fstat(kept.fd).st_size
        null = own(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        spec_fd = own(os.memfd_create("limosa-run", os.MFD_CLOEXEC))
        with open(os.dup(spec_fd), "wb") as file:
            file.write(json.dumps(spec).encode())
            file.seek(0)
        answer, answer_end = os.pipe2(os.O_CLOEXEC)
        reader = stack.enter_context(open(answer, "rb"))
        try:
            started = _spawn([null, kept.fd, kept.fd, spec_fd, answer_end, folder], ignored)
        except OSError as error:
            _take_away(kept)
            raise RunFailed(detail=f"no process can be started: {error.strerror}") from error
        finally:
            os.close(answer_end)
        said: dict[str, Any] = {}
        for line in reader:
            said.update(json.loads(line))
            if detach and "pid" in said and "exec" not in said:  # before it is the job: a quick one is gone soon
                exit_code.keep(Identity(said["pid"], said["start_time"]))
        if detach or "failed" in said or "exec" not in said:
            os.waitpid(started, 0)  # the first half of the double fork, or what is left of a start that failed
        if "failed" in said or "exec" not in said:
            _take_away(kept)
            raise _failure(command, said)
    # Told by the trampoline: a job that is quicker than we are has ended by now.
    identity = Identity(said["pid"], said["start_time"])
    return Launched(identity, str(kept.path), log_start, _warnings(said))


def _working_folder(cwd: str | os.PathLike[str] | None) -> int:
    """The job's working folder, open: by its name it may be another one a moment later, where others can change names.

    Raises:
        RunFailed: it cannot be opened.
    """
    try:
        if cwd is None:
            return os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        return _open_folder(os.path.abspath(cwd))
    except OSError as e:
        raise RunFailed(detail=f"chdir: {os.fspath(cwd or '.')}: {e.strerror}") from e


def _take_away(log: Log) -> None:
    """Removes a log that was made for a job which was not started: that very file, wherever its name leads now."""
    if not log.new:
        return
    with contextlib.suppress(OSError), log_folder(log.path) as folder:
        there, made = os.stat(log.path.name, dir_fd=folder, follow_symlinks=False), os.fstat(log.fd)
        if (there.st_dev, there.st_ino) == (made.st_dev, made.st_ino):
            os.unlink(log.path.name, dir_fd=folder)


def _spawn(sources: Sequence[int], ignored: Sequence[int]) -> int:
    """Starts the trampoline with ``sources`` as descriptors 0, 1, 2, … and returns its pid.

    Signals are at their default in it, but for those that stay ``ignored`` (from the first moment: a Ctrl-C for the
    rest of the script must not meet a job that is just starting).

    ``posix_spawn`` and not ``subprocess``: a forgotten ``Popen`` is reaped by the next one, with its exit code.
    """
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _ABOVE) for fd in sources]
    try:
        actions = [(os.POSIX_SPAWN_DUP2, fd, target) for target, fd in enumerate(moved)]
        argv = [sys.executable, "-I", "-S", str(_TRAMPOLINE)]
        defaults = [s for s in signal.valid_signals() if s not in (signal.SIGKILL, signal.SIGSTOP, *ignored)]
        return os.posix_spawn(
            sys.executable, argv, environment(), file_actions=actions, setsigmask=[], setsigdef=defaults
        )
    finally:
        for fd in moved:
            os.close(fd)


def _warnings(said: dict[str, Any]) -> tuple[Reason, ...]:
    if not said.get("no_new_privs"):
        return ()
    text = "without root the filter against io_uring needs no_new_privs: sudo and the like do not work inside the job"
    return (Reason(id="no-new-privs", text=text, hint="limosa run --no-seccomp"),)


def _failure(command: Sequence[str], said: dict[str, Any]) -> RunFailed:
    number, text, step = said.get("errno"), said.get("text", ""), said.get("failed", "")
    if step == "exec" and number in (errno.ENOENT, errno.ENOTDIR):
        return CommandNotFound(command=command[0])
    if step == "exec":
        return CommandNotExecutable(command=command[0], detail=os.strerror(number) if number else text)
    if step == "seccomp":
        return RunFailed(detail=f"the filter against io_uring: {text}", hint="limosa run --no-seccomp")
    return RunFailed(detail=f"{step}: {text}" if step else "the process ended before it could become the command")
