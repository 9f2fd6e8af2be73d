"""What CRIU brings back as it found it: a process that was stopped when it was frozen."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import stat_of

from limosa.errors import FailedUndone
from limosa.operation import leftovers
from limosa.operation.leftovers import connections_go_on, let_go_on
from limosa.process.criu.network import NetworkError
from limosa.process.identity import Identity, read_stat


def test_what_is_stopped_goes_on_and_is_named(start) -> None:
    """The driver does not answer about a stopped process: restoring such a job ended with 40."""
    running, stopped = start("counter"), start("counter")
    os.kill(stopped.pid, signal.SIGSTOP)
    stopped.until(lambda: stat_of(stopped.pid)[2] == "T", what="to be stopped")
    tree = [Identity.of(running.pid), Identity.of(stopped.pid)]
    assert let_go_on(tree) == [stopped.pid]
    stopped.goes_on(2)
    assert let_go_on(tree) == []


@pytest.mark.parametrize(("fails", "shut"), [(0, True), (1, True), (2, True), (2, False)])
def test_connections_that_stay_shut_are_no_secret(monkeypatch: pytest.MonkeyPatch, fails: int, shut: bool) -> None:
    """nft was killed, say: it is tried again, and where that fails as well, the undo has failed."""
    tried: list[int] = []

    def open_again(_: object, pid: int) -> None:
        tried.append(pid)
        if len(tried) <= fails:
            raise NetworkError(detail="nft: killed")

    monkeypatch.setattr(leftovers.network, "open_again", open_again)
    monkeypatch.setattr(leftovers, "find_criu", lambda: None)
    tree = [Identity.of(os.getpid())]
    if fails == 2 and shut:
        with pytest.raises(FailedUndone, match="nft: killed"):
            connections_go_on(tree, shut=shut)
    else:
        connections_go_on(tree, shut=shut)
    assert len(tried) == min(2, fails + 1)


SPAWNS = """
import os, sys
print("READY", flush=True)
os.posix_spawn("/bin/true", ["true"], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 0, sys.argv[1], os.O_RDONLY, 0)])
os.write(int(sys.argv[2]), b"on")
"""


def test_what_is_about_to_be_stopped_goes_on_as_well(tmp_path: Path) -> None:
    """A stop that CRIU had sent and that came after the look left a restored job stopped, and the driver hung."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    ours, theirs = os.pipe()
    command = [sys.executable, "-c", SPAWNS, str(fifo), str(theirs)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, pass_fds=[theirs]) as waiting:  # for its child's exec
        try:
            os.close(theirs)
            assert waiting.stdout is not None
            assert waiting.stdout.readline() == b"READY\n"
            end = time.monotonic() + 60
            while read_stat(waiting.pid).state != "D":
                assert time.monotonic() < end
                time.sleep(0.01)
            waiting.send_signal(signal.SIGSTOP)
            assert not read_stat(waiting.pid).stopped
            assert let_go_on([Identity.of(waiting.pid)]) == [waiting.pid]
            assert let_go_on([Identity.of(waiting.pid)]) == []
            os.close(os.open(fifo, os.O_WRONLY))
            assert select.select([ours], [], [], 5)[0]
            assert os.read(ours, 2) == b"on"
        finally:
            os.close(ours)
            waiting.kill()
