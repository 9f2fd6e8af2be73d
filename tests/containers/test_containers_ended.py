"""What ``recover`` does with a container that has ended since its operation was killed: its files are its own."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from containers.runtimes import Container
from support import KILLED_AS_IT_CAME_BACK, KILLED_AT_THE_END
from test_containers_to_disk import Desk, desk, desk_of, each, recovered, until

from limosa.containers.state import states

__all__ = ["desk", "desk_of"]
pytestmark = [pytest.mark.root, pytest.mark.criu, pytest.mark.timeout(300)]


def killed_at_the_end(desk: Desk, *words: object, program: str = KILLED_AT_THE_END) -> None:
    environment = desk.runtime.environment()
    del environment["HOME"]
    process = desk.node.popen([sys.executable, "-c", program, *words], env=environment)
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


def killed_as_it_ends_one(desk: Desk) -> Path:
    """The podman's runc is killed wherever it is told to end a container, while the file that is returned is there."""
    place = desk.runtime.place
    there, program = place / "killed", place / "bin" / "runc"
    program.parent.mkdir()
    program.write_text(
        f"""#!/bin/sh
case " $* " in *" kill "*|*" delete "*) [ -e {there} ] && kill -9 $$ ;; esac
exec {desk.runtime.engines["runc"]} "$@"
"""
    )
    program.chmod(0o755)
    conf = place / ".config" / "containers" / "containers.conf"
    conf.write_text(conf.read_text().replace(str(desk.runtime.engines["runc"]), str(program)))
    return there


@each("podman-living", "podman-ended")
def test_one_that_podman_forgets_and_does_not_end_is_ended(desk: Desk, word: str) -> None:
    """Where the runc below it is killed it says so once, and the next time it forgets a container that runs."""
    killed = killed_as_it_ends_one(desk)
    one = desk.job()
    one.goes_on()
    desk.checkpoint(one)
    if word == "living":
        killed_at_the_end(desk, "restore", desk.image(), program=KILLED_AS_IT_CAME_BACK)
        again = desk.back()
        killed.touch()
        desk.limosa("recover", rc=40)
        assert again.lives()
        desk.limosa("recover")
        until(lambda: not again.lives(), 10)
    else:  # limosa has ended it before
        killed.touch()
        desk.node.switches.add("function=cuCheckpointProcessRestore nth=1 result=UNKNOWN")
        desk.restore(rc=21)
    killed.unlink()
    assert desk.runtime.names() == []
    assert [s.id for s in states() if str(desk.runtime.place) in s.bundle] == []
    desk.restore()
    desk.back().goes_on()


@each("podman-host", "runc-host", "containerd-host")
def test_one_without_device_memory_that_came_back_goes_on(desk: Desk, word: str) -> None:
    """It runs as soon as its runtime has said so, whoever was killed before that was noted."""
    one = desk.runtime.start_job("/bin/sleep", 600, name=desk.name(), gpus=None)
    desk.checkpoint(one)
    killed_at_the_end(desk, "restore", desk.image(), program=KILLED_AS_IT_CAME_BACK)
    again = desk.back()
    recovered(desk)
    assert again.lives()
    assert desk.runtime.names() == [one.name]
    desk.limosa("verify", desk.image())
