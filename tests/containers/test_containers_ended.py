"""What ``recover`` does with a container that has ended since its operation was killed: its files are its own."""

from __future__ import annotations

import os
import signal
import sys

import pytest
from containers.runtimes import Container
from support import KILLED_AT_THE_END
from test_containers_to_disk import Desk, desk, desk_of, each, recovered, until

__all__ = ["desk", "desk_of"]
pytestmark = [pytest.mark.root, pytest.mark.criu, pytest.mark.timeout(300)]


def killed_at_the_end(desk: Desk, *words: object) -> None:
    environment = desk.runtime.environment()
    del environment["HOME"]
    process = desk.node.popen([sys.executable, "-c", KILLED_AT_THE_END, *words], env=environment)
    assert process.wait(120) == -signal.SIGKILL


def ends(one: Container) -> None:
    """It has done its work."""
    os.kill(one.pid, signal.SIGKILL)
    until(lambda: not one.lives())


@each("podman-driver", "containerd-driver", "runc-driver")
def test_a_container_that_was_only_copied_stays(desk: Desk, word: str) -> None:
    one = desk.job()
    one.goes_on()
    killed_at_the_end(desk, "checkpoint", desk.called(one), "--leave-running", "--output", desk.image())
    ends(one)
    recovered(desk)
    assert desk.runtime.names() == [one.name]
    desk.limosa("verify", desk.image())


@each("podman-driver", "containerd-driver", "runc-driver")
def test_one_that_came_back_and_has_ended_stays(desk: Desk, word: str) -> None:
    one = desk.job()
    one.goes_on()
    desk.checkpoint(one)
    killed_at_the_end(desk, "restore", desk.image(), "--to", "1")
    again = desk.back()
    again.goes_on()
    ends(again)
    recovered(desk)
    assert desk.runtime.names() == [one.name]
    desk.limosa("verify", desk.image())


@each("podman-driver")
def test_volumes_of_a_restore_that_failed_are_not_taken_for_the_jobs(desk: Desk, word: str) -> None:
    """They are podman's as soon as it begins, and filled much later: the next restore would leave them as they are."""
    vol = desk.name("vol")
    one = desk.job(options=["--volume", f"{vol}:/vol"])
    one.goes_on()
    one.run("sh", "-c", "echo kept > /vol/file")
    desk.checkpoint(one)
    desk.runtime("volume", "rm", vol)
    desk.runtime("volume", "create", f"{vol}-2")  # which podman would take for one whose name is only begun
    desk.node.switches.add("function=cuCheckpointProcessRestore nth=1 result=UNKNOWN")
    desk.restore(rc=21)
    assert desk.runtime("volume", "ls", "--quiet").stdout.split() == [f"{vol}-2"]
    desk.restore()
    assert desk.back().run("cat", "/vol/file").stdout == "kept\n"
