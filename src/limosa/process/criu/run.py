"""One run of CRIU on a job: dump and restore, with the caller asked at each of CRIU's steps.

CRIU gets a session of its own and ignores the signals that a terminal or an impatient person sends: dying in mid-dump
it would leave connected sockets in repair mode. It is told its folders as open descriptors, so that nobody can put
another folder in their place. At each step CRIU runs an action script; ours is a few lines of shell that ask the
caller through two inherited pipes and end with the answer. Where the caller says no, has died, or the script is
killed, CRIU fails and lets the job run on (dump) or ends what it has started (restore).

Between these steps a run is cancelled without killing CRIU, which then undoes everything itself: a dump by forbidding
it to write files (RLIMIT_FSIZE 0: its next write fails; 10 to 30 ms were measured), a restore by ending the
processes it is building. After a yes to "post-dump" or "post-restore" it is too late, and nothing is cancelled.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Generator, Sequence
from importlib import resources
from typing import IO, Literal

import msgspec

from limosa import start
from limosa.errors import CancelledUndone, CriuFailed, LimosaError, NoWorkingCriu, TimedOutUndone, UsageError
from limosa.process.criu import cgroup, log, network, stats
from limosa.process.criu.leftovers import Standstill, StoppedChildren
from limosa.process.criu.options import DumpOptions, RestoreOptions
from limosa.process.criu.program import PLUGIN, Criu
from limosa.process.criu.stats import DumpStats
from limosa.process.identity import Identity, read_stat
from limosa.process.tree import snapshot

__all__ = ["DumpOptions", "RestoreOptions", "dump", "nft_table", "restore"]

DUMP_LOG = "dump.log"
RESTORE_LOG = "restore.log"
SAID = "criu.out"  # what it says before it has opened its log
TICK = 0.05  # seconds between looks at cancel and the time limit
_SHIELD = "HUP INT QUIT PIPE XFSZ USR1 USR2 TSTP TTIN TTOU"
_IGNORED = {"dump": f"{_SHIELD} TERM", "restore": _SHIELD}
"""Signals that do not end CRIU.

At a restore it ends a helper of its own by TERM, and waits for that: one for control groups, where the job was
in another than CRIU when it was dumped. A helper that had inherited to ignore TERM stayed for ever, and so did CRIU."""
_LOG_LIMIT = 64 << 20  # bytes of a log that are looked at
_END_OF_LOG = 1 << 16  # bytes of its end, where CRIU says that it is done
_DONE = {"dump": b"Dumping finished successfully", "restore": b"Restore finished successfully"}

OnAction = Callable[[str], bool]
"""Told CRIU's step ("post-dump", "network-lock", …), in the caller's thread; False makes CRIU fail and undo."""
OnTick = Callable[[], None]
OnStart = Callable[[Identity], None]
"""Told who CRIU is, before it touches anything (it waits for the return: the place to write a journal)."""


def dump(  # noqa: PLR0913 - as CRIU has them
    criu: Criu,
    root_pid: int,
    images_fd: int,
    work_fd: int,
    options: DumpOptions | None = None,
    *,
    on_action: OnAction | None = None,
    on_start: OnStart | None = None,
    timeout: float | None = None,
    cancel: threading.Event | None = None,
    on_tick: OnTick | None = None,
) -> DumpStats:
    """Write a process and all its descendants into a folder.

    Without ``leave_running`` CRIU ends the job as its last act, after "post-dump" was answered with yes; the pids may
    stay as zombies until their parents reap them. Where anything fails, the job runs on.

    Args:
        criu: which CRIU (:func:`limosa.process.criu.find.find`).
        root_pid: the topmost process.
        images_fd: an open, empty folder for the images.
        work_fd: an open folder for the log (``dump.log``) and statistics.
        options: what the dump may do.
        on_action: told each of CRIU's steps; "post-dump" comes when the images are complete and the job is still
            frozen. What it raises is raised here after CRIU has let the job go.
        on_start: told who CRIU is before it does anything.
        timeout: seconds after which the run is cancelled, as long as "post-dump" has not been answered.
        cancel: the same as soon as it is set. While ``on_action`` works it is the one to look at it.
        on_tick: called twenty times a second in the caller's thread while CRIU works.

    Returns:
        Times and sizes.

    Raises:
        CriuFailed: with the first real error of its log (``fields["kind"]``: :mod:`limosa.process.criu.log`); the job
            runs on.
        TimedOutUndone, CancelledUndone: the job runs on.
        NoWorkingCriu: CRIU could not be started.
    """
    options = options or DumpOptions()
    arguments = ["dump", "--tree", str(root_pid), *options.arguments(criu)]
    run = _Run(criu, "dump", f"dump process {root_pid}", arguments, images_fd=images_fd, work_fd=work_fd)
    started = time.monotonic()
    run.start(on_start, new_session=True)
    run.follow(on_action, timeout, cancel, on_tick)
    found = stats.dump_stats(work_fd)
    return msgspec.structs.replace(
        found,
        seconds=time.monotonic() - started,
        action_seconds=run.action_seconds,
        run_id=stats.run_id(images_fd),
        nft_table=nft_table(criu, images_fd, root_pid, options),
    )


def restore(  # noqa: PLR0913 - as CRIU has them
    criu: Criu,
    images_fd: int,
    work_fd: int,
    options: RestoreOptions | None = None,
    *,
    on_action: OnAction | None = None,
    on_start: OnStart | None = None,
    timeout: float | None = None,
    cancel: threading.Event | None = None,
    locks: bytes = b"",
    user: tuple[int, Sequence[int]] = (0, ()),
) -> int:
    """Bring the processes of an image back to life under their old pids.

    Args:
        criu: which CRIU.
        images_fd: an open folder with the images.
        work_fd: an open folder for the log (``restore.log``) and statistics.
        options: what the restore may do.
        on_action: told each of CRIU's steps; "post-restore" comes when all is rebuilt and nothing runs yet. A no there
            ends what was rebuilt.
        on_start: told who CRIU is before it does anything.
        timeout: seconds after which the run is cancelled, as long as "post-restore" has not been answered.
        cancel: the same as soon as it is set.
        locks: the POSIX locks that the plugin takes again, as in CRIU's ``filelocks.img``; empty for that very file.
        user: the job's uid and its groups, the first one first: with his rights the guard makes what lies in a group's
            or everybody's folder.

    Returns:
        The pid of the topmost process, which runs. Its parent is the caller where the caller is a subreaper (prctl(2)
        PR_SET_CHILD_SUBREAPER), else init.

    Raises:
        CriuFailed: with the first real error of its log; nothing runs.
        TimedOutUndone, CancelledUndone: nothing runs.
        NoWorkingCriu: CRIU could not be started.
        UsageError: there is no such control group.
        PermissionDenied: it may not be entered.
    """
    options = options or RestoreOptions()
    arguments = ["restore", "--restore-detached", "--pidfile", "restore.pid", *options.arguments()]
    run = _Run(criu, "restore", "restore the image", arguments, images_fd=images_fd, work_fd=work_fd)
    # An old answer must not pass for a new one: CRIU does not write over a pid file.
    _unlink("restore.pid", work_fd)
    # CRIU takes the terminal for a shell's job from its own session.
    enter, inherit = cgroup.entry_files(options.cgroup), tuple(options.inherit.values())
    run.start(on_start, new_session=not options.shell_job, enter=enter, locks=locks, inherit=inherit, user=user)
    run.follow(on_action, timeout, cancel)
    raw = stats.read_at(work_fd, "restore.pid").strip()
    if not raw.isdigit():
        raise CriuFailed(what="restore the image", reason="it has not said which pid it restored", log=run.log_path)
    return int(raw)


class _Run:
    """A CRIU under way and the two pipes to its action script."""

    def __init__(
        self,
        criu: Criu,
        kind: Literal["dump", "restore"],
        what: str,
        arguments: list[str],
        *,
        images_fd: int,
        work_fd: int,
    ):
        self.kind = kind
        self.what = what
        self.work_fd = work_fd
        self.log_name = DUMP_LOG if kind == "dump" else RESTORE_LOG
        self.log_path = os.path.join(os.readlink(f"/proc/self/fd/{work_fd}"), self.log_name)
        self.action_seconds = 0.0
        self._images_fd = images_fd
        self._criu = criu
        self._arguments = arguments
        self._ask: IO[bytes] | None = None  # where the script's questions arrive
        self._asks = ("", "")  # CRIU's own end of that: its number, and what it is
        self._answer = -1  # where answers are written
        self._child: subprocess.Popen[bytes] | None = None
        self._too_late = False  # the step after which nothing is cancelled has been answered with yes
        self._cancelled: LimosaError | None = None
        self._raised: BaseException | None = None  # by on_action

    def start(
        self,
        on_start: OnStart | None,
        *,
        new_session: bool,
        enter: Sequence[str] = (),
        locks: bytes = b"",
        inherit: Sequence[int] = (),
        user: tuple[int, Sequence[int]] = (0, ()),
    ) -> None:
        """Start CRIU; it does nothing before ``on_start`` has returned."""
        if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:  # CRIU would ignore it as well
            raise UsageError(
                detail="this program ignores SIGCHLD, so that nobody can tell whether CRIU has done what it was told",
                hint="signal.signal(signal.SIGCHLD, signal.SIG_DFL) before",
            )
        _unlink(self.log_name, self.work_fd)
        ask_read, ask_write = os.pipe()
        answer_read, answer_write = os.pipe()
        self._ask, self._answer = os.fdopen(ask_read, "rb", 0), answer_write
        self._asks = (str(ask_write), os.readlink(f"/proc/self/fd/{ask_write}"))
        # What is on another file system is dumped by its path there; the plugin serves inherited device mappings.
        plugin = ["--libdir", self._criu.plugin_dir] if self._criu.plugin_dir else []
        command = [
            *self._criu.argv,
            *self._arguments,
            "--images-dir", f"/proc/self/fd/{self._images_fd}",
            "--work-dir", f"/proc/self/fd/{self.work_fd}",
            "--log-file", self.log_name,
            "-v4",
            "--manage-cgroups=ignore",
            "--action-script", _script("action.sh"),
            *plugin,
        ]  # fmt: skip
        # No HOME: CRIU would take options, also programs to run, from a file there.
        environment = {"LIMOSA_ASK": str(ask_write), "LIMOSA_ANSWER": str(answer_read), "LC_ALL": "C.UTF-8"}
        if self._criu.asks_retry:
            environment["LIMOSA_CRIU_RETRY"] = "1"
        environment["PATH"] = start.environment()["PATH"]
        handed = []
        if self._criu.plugin_dir and os.geteuid() == 0:
            # By its descriptor: a path with a space or a colon would be several, or none.
            handed.append(os.open(os.path.join(self._criu.plugin_dir, PLUGIN), os.O_RDONLY | os.O_CLOEXEC))
            guard = str(start.installer())
            if user[0]:
                guard += ":" + ",".join(str(number) for number in (user[0], *user[1]))
            environment |= {"LIMOSA_GUARD": guard, "LIMOSA_PRELOAD": f"/proc/self/fd/{handed[0]}"}
        if locks:
            handed.append(os.memfd_create("limosa-locks", os.MFD_CLOEXEC))
            with open(handed[-1], "wb", closefd=False) as file:
                file.write(locks)
            environment["LIMOSA_LOCKS"] = str(handed[-1])
        said = os.open(
            SAID, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self.work_fd
        )
        try:
            self._child = start.popen(
                ["/bin/sh", _script("start.sh"), _IGNORED[self.kind], str(len(enter)), *enter, *command],
                stdin=None if not new_session else subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                start_new_session=new_session,
                pass_fds=(self._images_fd, self.work_fd, ask_write, answer_read, *handed, *inherit),
                env=environment,
            )
        except OSError as error:
            self.close()
            raise NoWorkingCriu(detail=f"{self._criu.argv[0]} cannot be started: {error}") from None
        finally:
            os.close(ask_write)
            os.close(answer_read)
            os.close(said)
            for fd in handed:
                os.close(fd)
        try:
            if on_start is not None:
                pid = self._child.pid
                on_start(Identity(pid, read_stat(pid).start_time))
        except BaseException:
            self.close()  # no go-ahead: it ends before it has become CRIU
            self._child.wait()
            raise
        self._reply(True)

    def follow(
        self,
        on_action: OnAction | None,
        timeout: float | None,
        cancel: threading.Event | None,
        on_tick: OnTick | None = None,
    ) -> None:
        """Answer the script's questions until CRIU has ended; raises what the docstrings above say."""
        assert self._child is not None
        limit = None if timeout is None else time.monotonic() + timeout
        try:
            with contextlib.closing(self._heard(on_action)) as heard:
                for idle in heard:
                    if on_tick is not None and idle:
                        on_tick()
                    if self._cancelled is None and not self._too_late:
                        if cancel is not None and cancel.is_set():
                            self._cancelled = CancelledUndone(what=f"CRIU's attempt to {self.what}")
                        elif limit is not None and time.monotonic() > limit:
                            self._cancelled = TimedOutUndone(what=f"CRIU's attempt to {self.what}", seconds=timeout)
                    if self._cancelled is not None:
                        self._stop()
            status = self._exit_status()
            if status < 0:
                StoppedChildren(self._has_our_pipe).end()
        except BaseException:
            # Ctrl-C in a program that uses this as a library: whoever asks from here on gets a no, and what CRIU does
            # with that is waited for, so that the caller's undo comes after it.
            self.close()
            self._child.wait()
            raise
        finally:
            self.close()
        self._judge(status)

    def _heard(self, on_action: OnAction | None) -> Generator[bool, None, None]:
        """Answer the script's questions until CRIU has ended.

        Yields:
            Before each answer, and at each tick: whether nothing was asked.
        """
        assert self._child is not None
        assert self._ask is not None
        buffer = b""
        standstill = Standstill(self._child.pid)
        pidfd = os.pidfd_open(self._child.pid)
        try:
            poller = select.poll()
            poller.register(self._ask, select.POLLIN)
            poller.register(pidfd, select.POLLIN)
            while True:
                ready = [fd for fd, _ in poller.poll(int(TICK * 1000))]
                yield not ready
                if self.kind == "restore" and standstill():
                    os.kill(self._child.pid, signal.SIGKILL)  # not reaped yet, so still its own
                if self._ask.fileno() in ready:
                    chunk = self._ask.read(4096) or b""
                    if not chunk:
                        poller.unregister(self._ask)
                    buffer += chunk
                    while b"\n" in buffer:
                        line, _, buffer = buffer.partition(b"\n")
                        self._act(line.decode(errors="replace"), on_action)
                elif pidfd in ready:
                    return
        finally:
            os.close(pidfd)

    def _judge(self, status: int) -> None:
        """Raise what CRIU's end says."""
        if self._raised is not None:
            raise self._raised
        if status == 0:
            return  # also where cancelling came too late to stop it
        if self._cancelled is not None:
            raise self._cancelled
        text = "".join(
            stats.read_at(self.work_fd, name, _LOG_LIMIT).decode(errors="replace") for name in (self.log_name, SAID)
        )
        cause = log.cause(text, status)
        raise CriuFailed(what=self.what, reason=cause.text, log=self.log_path, kind=cause.kind, raw=cause.raw)

    def _exit_status(self) -> int:
        """CRIU's exit code; where somebody else in this program has reaped it, what its log ends with."""
        assert self._child is not None
        try:
            os.waitid(os.P_PID, self._child.pid, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:
            self._child.wait()  # says 0 whatever it was
            return 0 if self._says_done() else 1
        return self._child.wait()

    def _has_our_pipe(self, pid: int) -> bool:
        number, pipe = self._asks
        with contextlib.suppress(OSError):
            return os.readlink(f"/proc/{pid}/fd/{number}") == pipe
        return False

    def _says_done(self) -> bool:
        """Whether the last that CRIU has written is that it has done it."""
        try:
            fd = os.open(self.log_name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.work_fd)
        except OSError:
            return False
        with open(fd, "rb") as file:
            file.seek(max(0, os.fstat(fd).st_size - _END_OF_LOG))
            return _DONE[self.kind] in file.read()

    def _act(self, action: str, on_action: OnAction | None) -> None:
        """Answer one question."""
        verdict = self._raised is None and self._cancelled is None
        if verdict and on_action is not None:
            before = time.monotonic()
            try:
                verdict = on_action(action)
            except BaseException as error:
                self._raised, verdict = error, False
            self.action_seconds += time.monotonic() - before
        if verdict and action in ("post-dump", "post-restore"):
            self._too_late = True
        self._reply(verdict)

    def _stop(self) -> None:
        """Make a CRIU that is between two steps fail, so that it undoes all by itself."""
        assert self._child is not None
        pid = self._child.pid  # not reaped yet, so still its own
        with contextlib.suppress(OSError):
            if self.kind == "dump":
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, 0))
            else:  # not from /proc/PID/task/TID/children, which not every kernel has
                for child, stat in snapshot().items():
                    if stat.ppid == pid:
                        os.kill(child, signal.SIGKILL)  # CRIU's own child: it reaps it, nobody else has its pid

    def _reply(self, verdict: bool) -> None:
        try:
            os.write(self._answer, b"yes\n" if verdict else b"no\n")
        except BrokenPipeError:
            pass  # the script or CRIU has ended; its exit status says so

    def close(self) -> None:
        """Close our ends of the pipes: whoever still asks gets a no."""
        if self._ask is not None:
            self._ask.close()
            self._ask = None
        if self._answer >= 0:
            os.close(self._answer)
            self._answer = -1


def _script(name: str) -> str:
    return str(resources.files("limosa.process.criu").joinpath(name))


def _unlink(name: str, folder_fd: int) -> None:
    try:
        os.unlink(name, dir_fd=folder_fd)
    except FileNotFoundError:
        pass


def nft_table(criu: Criu, images_fd: int, root_pid: int, options: DumpOptions) -> str | None:
    """Return the nftables table that a dump has made and that is there now, e.g. ``inet CRIU-1b4e28ba-2fa1-11d2-8``.

    Its name is the run id cut to what CRIU's buffer holds (21 characters in 4.2.1); before 4.2 the topmost pid. Right
    from "post-dump" on. CRIU makes one whenever connected sockets may be there (``tcp_established``).

    Args:
        criu: that made the dump.
        images_fd: the folder of the images.
        root_pid: the topmost process of the dump.
        options: of the dump.
    """
    if (options.network_lock or criu.network_lock) != "nftables" or not options.tcp_established:
        return None
    name = stats.run_id(images_fd) or str(root_pid)
    try:
        there = network.tables(criu)
    except LimosaError:
        return f"inet CRIU-{name[:21]}"  # nobody can look: say what it would be called
    found = [table for table in there if name.startswith(table.removeprefix("inet CRIU-"))]
    return max(found, key=len) if found else None
