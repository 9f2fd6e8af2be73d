"""Dump and restore with real CRIU: steps and answers, cancelling, what a killed CRIU leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from limosa.errors import CancelledUndone, CriuFailed, PermissionDenied, TimedOutUndone, UsageError
from limosa.process.criu import leftovers, network, run
from limosa.process.criu.run import DumpOptions, RestoreOptions, dump, nft_table, restore
from limosa.process.identity import Identity

pytestmark = pytest.mark.criu

TCP = DumpOptions(tcp_established=True)
BACK = RestoreOptions(tcp_established=True)
# The trial's victim with 80 MB to write: long enough to be interrupted in between.
LARGE = f"""
import runpy, sys
ballast = bytearray(b"ab" * (40 << 20))
runpy.run_path({str(Path(network.__file__).with_name("trial_victim.py"))!r}, run_name="__main__")
"""


def test_dump_ends_the_job_and_restore_brings_it_back_with_its_connections(criu, job):
    victim = job()
    steps: list[str] = []
    who: list[Identity] = []

    def on_action(step: str) -> bool:
        steps.append(step)
        return True

    stats = dump(criu, victim.pid, victim.images, victim.work, TCP, on_action=on_action, on_start=who.append)
    assert steps[-1] == "post-dump"
    assert who[0].pid != victim.pid
    assert not who[0].alive()
    victim.reap()
    before = victim.beats()
    assert stats.pages * os.sysconf("SC_PAGE_SIZE") == stats.bytes > 0
    assert 0 < stats.frozen_time < stats.seconds < 250
    assert stats.nft_table in network.tables(criu)
    assert stats.run_id.startswith(stats.nft_table.removeprefix("inet CRIU-"))
    steps.clear()
    assert restore(criu, victim.images, victim.work, BACK, on_action=on_action) == victim.pid
    assert "post-restore" in steps
    assert victim.goes_on(), victim.errors()
    assert victim.beats() > before
    assert stats.nft_table not in network.tables(criu)


def test_leave_running_keeps_the_job_and_its_connections(criu, job):
    victim = job()
    options = DumpOptions(tcp_established=True, leave_running=True)
    stats = dump(criu, victim.pid, victim.images, victim.work, options)
    assert victim.goes_on(), victim.errors()
    assert stats.nft_table is None


def test_a_no_to_post_dump_lets_the_job_run_on(criu, job):
    victim = job()
    with pytest.raises(CriuFailed) as caught:
        dump(criu, victim.pid, victim.images, victim.work, TCP, on_action=lambda step: step != "post-dump")
    assert caught.value.fields["kind"] == "script"
    assert victim.goes_on(), victim.errors()
    assert network.leave_repair(victim.pid) == 0


def test_what_the_caller_raises_in_a_step_comes_out_and_the_job_runs_on(criu, job):
    victim = job()

    def on_action(step: str) -> bool:
        if step == "post-dump":
            raise ZeroDivisionError
        return True

    with pytest.raises(ZeroDivisionError):
        dump(criu, victim.pid, victim.images, victim.work, TCP, on_action=on_action)
    assert victim.goes_on(), victim.errors()


def test_criu_does_nothing_when_the_journal_cannot_be_written(criu, job):
    victim = job()

    def on_start(_: Identity) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        dump(criu, victim.pid, victim.images, victim.work, TCP, on_start=on_start)
    assert os.listdir(victim.folder / "images") == []
    assert victim.goes_on()


@pytest.mark.parametrize("killed", ["caller", "script"])
def test_when_caller_or_script_is_killed_in_post_dump_the_job_runs_on(criu, job, tmp_path, killed):
    victim = job()
    helper = f"""
import os, sys, time, msgspec
from limosa.process.criu.program import Criu
from limosa.process.criu.run import DumpOptions, dump
criu = msgspec.json.decode({_json(criu)!r}, type=Criu)
images = os.open({str(victim.folder / "images")!r}, os.O_RDONLY)
work = os.open({str(victim.folder / "work")!r}, os.O_RDONLY)
def on_action(step):
    if step == "post-dump":
        print("asked", flush=True)
        time.sleep(20)
    return True
dump(criu, {victim.pid}, images, work, DumpOptions(tcp_established=True), on_action=on_action,
     on_start=lambda who: print(who.pid, flush=True))
"""
    caller = subprocess.Popen([sys.executable, "-c", helper], stdout=subprocess.PIPE)
    try:
        pid = int(caller.stdout.readline())
        assert caller.stdout.readline() == b"asked\n"
        who = Identity.of(pid)
        if killed == "caller":
            caller.kill()
        else:
            with open(f"/proc/{pid}/task/{pid}/children") as file:
                (script,) = file.read().split()
            os.kill(int(script), signal.SIGKILL)
        _until(lambda: not who.alive())
    finally:
        caller.kill()
        caller.wait()
    assert victim.goes_on(), victim.errors()
    assert network.leave_repair(victim.pid) == 0


@pytest.mark.parametrize("signals", [(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGPIPE)])
def test_stray_signals_do_not_end_criu(criu, job, signals):
    victim = job()
    who: list[Identity] = []

    def on_action(_: str) -> bool:
        for number in signals:
            os.kill(who[0].pid, number)
        return True

    dump(criu, victim.pid, victim.images, victim.work, TCP, on_action=on_action, on_start=who.append)
    victim.reap()
    assert restore(criu, victim.images, victim.work, BACK) == victim.pid
    assert victim.goes_on()
    ignored = int(Path(f"/proc/{victim.pid}/status").read_text().split("SigIgn:")[1].split()[0], 16)
    assert not ignored >> (signal.SIGTERM - 1) & 1  # what is restored does not inherit the shield


@pytest.mark.parametrize("delay", [0.0, 0.03, 0.06, 0.1, 0.15])
def test_a_dump_cancelled_at_any_time_leaves_the_job_running_unharmed(criu, job, delay):
    victim = job(LARGE)
    cancel = threading.Event()
    with pytest.raises(CancelledUndone):
        dump(
            criu, victim.pid, victim.images, victim.work, TCP, cancel=cancel,
            on_start=lambda _: threading.Timer(delay, cancel.set).start(),
            on_action=lambda step: step != "post-dump" or not cancel.wait(60),
        )  # fmt: skip
    assert victim.goes_on(), victim.errors()
    assert network.leave_repair(victim.pid) == 0
    assert nft_table(criu, victim.images, victim.pid, TCP) is None


def test_a_dump_that_takes_too_long_is_undone_quickly(criu, job):
    victim = job(LARGE)
    started = time.monotonic()
    with pytest.raises(TimedOutUndone):
        dump(criu, victim.pid, victim.images, victim.work, TCP, timeout=0.05)
    assert time.monotonic() - started < 30
    assert victim.goes_on(), victim.errors()


def test_cancelling_after_the_yes_to_post_dump_is_too_late(criu, job):
    victim = job()
    cancel = threading.Event()

    def on_action(step: str) -> bool:
        if step == "post-dump":
            cancel.set()  # while the caller works: its own business
        return True

    assert dump(criu, victim.pid, victim.images, victim.work, TCP, on_action=on_action, cancel=cancel).pages > 0
    victim.reap()


@pytest.mark.parametrize("delay", [0.0, 0.05, 0.1, 0.2])
def test_a_cancelled_restore_leaves_nothing_and_can_be_done_again(criu, job, delay):
    victim = job(LARGE)
    dump(criu, victim.pid, victim.images, victim.work, TCP)
    victim.reap()
    cancel = threading.Event()
    threading.Timer(delay, cancel.set).start()
    with pytest.raises(CancelledUndone):
        restore(
            criu, victim.images, victim.work, BACK, cancel=cancel,
            on_action=lambda step: step != "post-restore" or not cancel.wait(60),
        )  # fmt: skip
    victim.reap()
    assert restore(criu, victim.images, victim.work, BACK) == victim.pid
    assert victim.goes_on(), victim.errors()


def test_a_no_to_post_restore_leaves_nothing(criu, job):
    victim = job()
    dump(criu, victim.pid, victim.images, victim.work, TCP)
    victim.reap()
    with pytest.raises(CriuFailed):
        restore(criu, victim.images, victim.work, BACK, on_action=lambda step: step != "post-restore")
    victim.reap()


@pytest.mark.parametrize("at", ["pre-restore", "post-restore"])
def test_what_a_killed_restore_leaves_is_found_and_ended(criu, job, at):
    victim = job()
    dump(criu, victim.pid, victim.images, victim.work, TCP)
    victim.reap()
    who: list[Identity] = []

    def on_action(step: str) -> bool:
        if step == at:
            os.kill(who[0].pid, signal.SIGKILL)
            time.sleep(0.1)
        return True

    with pytest.raises(CriuFailed) as caught:
        restore(criu, victim.images, victim.work, BACK, on_action=on_action, on_start=who.append)
    assert caught.value.fields["kind"] == "killed"
    pids = [victim.pid]
    log = os.stat("restore.log", dir_fd=victim.work).st_mtime
    left = leftovers.find_unfinished(who[0], pids, log)
    if at == "post-restore":
        assert victim.pid in [identity.pid for identity in left]
        pids += victim.session()
    leftovers.end_unfinished(who[0], pids, log)
    victim.reap()
    assert restore(criu, victim.images, victim.work, BACK) == victim.pid
    assert victim.goes_on(), victim.errors()


def test_who_has_got_such_a_pid_since_is_left_alone():
    """A shell, which leads a session, and what it starts: by CRIU's pid, and by one of the image's."""
    before = time.time()
    time.sleep(2.5)
    with subprocess.Popen(
        ["sh", "-c", "sleep 60 & echo; wait"], start_new_session=True, stdout=subprocess.PIPE
    ) as shell:
        try:
            shell.stdout.readline()
            young = Identity.of(shell.pid).start_time
            for criu, pids in ((Identity(shell.pid, young - 100), []), (Identity(1, young - 100), [shell.pid])):
                assert leftovers.find_unfinished(criu, pids), "by its pids alone it could be one"
                assert not leftovers.find_unfinished(criu, pids, before)
        finally:
            os.killpg(shell.pid, signal.SIGKILL)


def test_the_restored_job_goes_into_the_group_asked_for(criu, job):
    group = _make_group()
    victim = job()
    try:
        dump(criu, victim.pid, victim.images, victim.work, TCP)
        victim.reap()
        restore(criu, victim.images, victim.work, RestoreOptions(tcp_established=True, cgroup=str(group)))
        assert victim.pid in map(int, (group / "cgroup.procs").read_text().split())
        assert victim.goes_on()
    finally:
        victim.end()
        victim.fds.clear()
        group.rmdir()


def test_a_job_that_was_in_another_group_than_limosa_comes_back(criu, job):
    """CRIU waited for its helper for control groups, which ignored the SIGTERM by which it is ended, for ever."""
    group = _make_group()
    victim = job()
    try:
        (group / "cgroup.procs").write_text(str(victim.pid))
        dump(criu, victim.pid, victim.images, victim.work, TCP)
        victim.reap()
        assert restore(criu, victim.images, victim.work, BACK, timeout=120) == victim.pid
        assert victim.goes_on()
        blocked = int(Path(f"/proc/{victim.pid}/status").read_text().split("SigBlk:")[1].split()[0], 16)
        assert not blocked >> (signal.SIGTERM - 1) & 1
    finally:
        victim.end()
        victim.fds.clear()
        group.rmdir()


def test_a_group_that_is_not_there_is_refused_before_anything_starts(criu, job):
    victim = job()
    with pytest.raises(UsageError, match="no control group"):
        restore(criu, victim.images, victim.work, RestoreOptions(cgroup="/sys/fs/cgroup/limosa-not-there"))
    assert victim.goes_on()


def test_a_job_without_connections_leaves_no_table(criu, job):
    victim = job(COUNTER)
    stats = dump(criu, victim.pid, victim.images, victim.work)
    victim.reap()
    assert stats.nft_table is None
    assert restore(criu, victim.images, victim.work) == victim.pid
    assert victim.goes_on()


def test_a_killed_dump_leaves_repair_mode_and_a_table_which_are_cleared(criu, job):
    victim = job(QUIET)  # it does not touch its connection until it is told to
    who: list[Identity] = []

    def on_action(step: str) -> bool:
        if step == "post-dump":
            os.kill(who[0].pid, signal.SIGKILL)
            time.sleep(0.1)
        return True

    with pytest.raises(CriuFailed):
        dump(criu, victim.pid, victim.images, victim.work, TCP, on_action=on_action, on_start=who.append)
    assert victim.goes_on(), victim.errors()
    assert network.leave_repair(victim.pid) == 2  # both ends are the victim's
    assert network.leave_repair(victim.pid) == 0
    table = nft_table(criu, victim.images, victim.pid, TCP)
    assert network.remove_table(criu, table)
    assert not network.remove_table(criu, table)
    (victim.folder / "talk").touch()
    _until(lambda: (victim.folder / "talked").exists() or victim.errors())
    assert (victim.folder / "talked").read_text() == "hello", victim.errors()


@pytest.mark.slow
def test_without_clearing_the_sockets_of_a_killed_dump_stay_useless(criu, job):
    victim = job(QUIET)
    who: list[Identity] = []

    def on_action(step: str) -> bool:
        if step == "post-dump":
            os.kill(who[0].pid, signal.SIGKILL)
            time.sleep(0.1)
        return True

    with pytest.raises(CriuFailed):
        dump(criu, victim.pid, victim.images, victim.work, TCP, on_action=on_action, on_start=who.append)
    (victim.folder / "talk").touch()
    _until(lambda: (victim.folder / "talked").exists() or victim.errors())
    assert "Operation not permitted" in victim.errors() or "timed out" in victim.errors()


def test_a_name_that_is_no_table_of_criu_is_not_handed_to_nft(criu):
    for name in ("inet filter", "inet CRIU-1; flush ruleset", "inet CRIU-", "ip CRIU-1"):
        with pytest.raises(network.NetworkError):
            network.remove_table(criu, name)


def test_somebody_elses_sockets_are_not_touched(job):
    victim = job(COUNTER)
    pid = os.fork()
    if pid == 0:
        os.setuid(65534)
        try:
            network.leave_repair(victim.pid)
        except PermissionDenied:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0


COUNTER = """
import os, sys, time
beat = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
for number in range(6000):
    os.write(beat, b"%d\\n" % number)
    time.sleep(0.01)
"""
QUIET = """
import os, socket, sys, time
listener = socket.create_server(("127.0.0.1", 0))
near = socket.create_connection(listener.getsockname())
far, _ = listener.accept()
beat = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
for number in range(6000):
    os.write(beat, b"%d\\n" % number)
    time.sleep(0.01)
    if os.path.exists("talk") and not os.path.exists("talked"):
        near.sendall(b"hello")
        far.settimeout(15)
        text = far.recv(5)
        with open("talked.new", "wb") as file:
            file.write(text)
        os.rename("talked.new", "talked")
"""


def _json(criu) -> bytes:
    import msgspec

    return msgspec.json.encode(criu)


def _until(true, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def _make_group() -> Path:
    root = Path("/sys/fs/cgroup")
    if not (root / "cgroup.procs").exists():
        root = next(
            path for path in sorted(root.iterdir()) if (path / "cgroup.procs").exists() and path.name != "cpuset"
        )
    group = root / f"limosa-test-{os.getpid()}"
    group.mkdir()
    return group


def test_the_script_of_a_criu_that_was_killed_writes_into_nobodys_file(tmp_path):
    """Its parent is whoever adopts it then: init, say, which has files of its own at those numbers."""
    file = tmp_path / "log"
    file.write_text("kept")
    with open(file, "r+") as opened:
        env = {**os.environ, "LIMOSA_ASK": str(opened.fileno()), "LIMOSA_ANSWER": str(opened.fileno())}
        script = Path(run.__file__).with_name("action.sh")
        ran = subprocess.run(
            ["/bin/sh", script], env={**env, "CRTOOLS_SCRIPT_ACTION": "post-resume"}, timeout=60, check=False
        )
    assert ran.returncode == 1
    assert file.read_text() == "kept"


@pytest.mark.parametrize("well", [True, False], ids=["CRIU has done it", "CRIU has failed"])
def test_a_program_that_reaps_all_children_is_told_the_truth(criu, job, monkeypatch, well):
    """Python calls an exit code that it cannot have 0: a dump that had failed was taken for one that had not."""
    victim = job()
    wait = run._Run._exit_status

    def too_late(self: run._Run) -> int:
        os.waitpid(self._child.pid, 0)
        return wait(self)

    monkeypatch.setattr(run._Run, "_exit_status", too_late)
    if well:
        dump(criu, victim.pid, victim.images, victim.work, TCP)
        victim.reap()
        assert restore(criu, victim.images, victim.work, BACK) == victim.pid
    else:
        with pytest.raises(CriuFailed):
            dump(criu, victim.pid, victim.images, victim.work, TCP, on_action=lambda step: step != "post-dump")
    assert victim.goes_on(), victim.errors()


def test_a_program_that_ignores_sigchld_is_told_before_anything_begins(criu, job):
    victim = job()
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with pytest.raises(UsageError, match="SIGCHLD"):
            dump(criu, victim.pid, victim.images, victim.work, TCP)
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert victim.goes_on(), victim.errors()
    assert os.listdir(victim.folder / "images") == []
