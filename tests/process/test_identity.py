"""Who a process is: pid and start time, never a thread, a zombie or somebody who came after."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from limosa.errors import NoSuchProcess, NotAProcess, OwnAncestor, PidReused, UsageError, Zombie
from limosa.process.identity import Handle, Identity, ancestors, read_stat, refuse_ancestor

GONE = 4_000_000  # nothing runs under a pid this high while tests do


def test_identity_is_pid_and_start_time_and_goes_to_text_and_back():
    own = Identity.of(os.getpid())
    assert own == Identity.of(os.getpid())
    assert Identity.from_str(own.to_str()) == own
    assert own.alive()
    own.check()
    with open("/proc/uptime") as file:
        uptime = float(file.read().split()[0])
    assert 0 < own.start_time / os.sysconf("SC_CLK_TCK") <= uptime


@pytest.mark.parametrize("text", ["", "12", "12@", "@5", "a@5", "12@-5", "12@5x", "١@٢"])
def test_what_is_no_identity_is_refused(text):
    with pytest.raises(UsageError):
        Identity.from_str(text)


@pytest.mark.parametrize("pid", [0, -1, True, "12", 1.0, 1 << 40])
def test_what_is_no_pid_is_refused(pid):
    with pytest.raises(UsageError):
        Identity.of(pid)


def test_nothing_under_this_pid():
    with pytest.raises(NoSuchProcess) as raised:
        Identity.of(GONE)
    assert raised.value.exit_code == 10


def test_a_threads_id_is_not_a_process():
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        with pytest.raises(NotAProcess) as raised:
            Identity.of(thread.native_id)
        assert raised.value.fields["tgid"] == os.getpid()
        with pytest.raises(NotAProcess):
            Handle(Identity(thread.native_id, read_stat(thread.native_id).start_time))
    finally:
        stop.set()
        thread.join()


def test_a_zombie_is_not_alive():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    identity = Identity.of(child.pid)
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    try:
        assert not identity.alive()
        with pytest.raises(Zombie) as raised:
            Identity.of(child.pid)
        assert raised.value.fields["ppid"] == os.getpid()
        with pytest.raises(Zombie):
            identity.check()
    finally:
        child.wait()
    assert not identity.alive()
    with pytest.raises(NoSuchProcess):
        identity.check()


def test_a_process_whose_main_thread_alone_has_ended_is_alive(job):
    victim = job("threading.Timer(0.1, ready).start(); libc.pthread_exit(None)")
    end = time.monotonic() + 60
    while read_stat(victim.pid).state != "Z":
        assert time.monotonic() < end
    assert Identity.of(victim.pid).alive()


def test_another_process_under_the_same_pid_is_told():
    own = Identity.of(os.getpid())
    before = Identity(own.pid, own.start_time - 1)
    assert not before.alive()
    with pytest.raises(PidReused) as raised:
        before.check()
    assert raised.value.exit_code == 20
    with pytest.raises(PidReused):
        Handle(before)


def test_a_name_with_spaces_and_parentheses(job):
    victim = job("libc.prctl(15, b') S 1 (x y')")
    assert read_stat(victim.pid).name == ") S 1 (x y"
    assert read_stat(victim.pid).ppid == os.getpid()


def test_a_handle_signals_and_waits_and_leaves_no_descriptor(job):
    victim = job("")
    before = len(os.listdir("/proc/self/fd"))
    with Handle(victim.identity) as handle:
        assert not handle.wait(0.01)
        handle.signal(signal.SIGKILL)
        assert handle.wait(60)
        victim.process.wait()
        with pytest.raises(NoSuchProcess):
            handle.signal(signal.SIGTERM)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_handle_never_reaches_whoever_comes_after(job):
    victim = job("")
    identity = victim.identity
    victim.process.kill()
    victim.process.wait()
    with pytest.raises(NoSuchProcess):
        Handle(identity)


def test_ancestors_lead_up_to_init(job):
    found = ancestors()
    assert found[0].pid == os.getppid()
    assert found[-1].pid == 1
    assert ancestors(job("").pid)[0] == Identity.of(os.getpid())


def test_limosa_and_its_ancestors_are_refused_and_others_are_not(job):
    for pid in (os.getpid(), os.getppid(), 1):
        with pytest.raises(OwnAncestor):
            refuse_ancestor(Identity.of(pid))
    refuse_ancestor(job("").identity)
