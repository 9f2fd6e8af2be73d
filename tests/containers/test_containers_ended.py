"""What ``recover`` does with a container that has ended since its operation was killed: its files are its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from pathlib import Path

import pytest
from containers.runtimes import Container, cgroup_layouts
from support import KILLED_AS_IT_CAME_BACK, KILLED_AS_IT_WAS_COMMITTED, KILLED_AT_THE_END
from test_containers_killed import workers
from test_containers_to_disk import Desk, begin, desk, desk_of, each, recovered, until

from limosa.containers.freezer import thaw
from limosa.containers.state import states
from limosa.process.cgroups import frozen_by
from limosa.process.tree import descendants, snapshot

__all__ = ["desk", "desk_of"]
STARTED_ANEW = """
import os, sys
from limosa.operation.steps.container_dump import ContainerDumping
real = ContainerDumping._end
def end(self):
    assert os.system("(AGAIN) >&2") == 0
    real(self)
ContainerDumping._end = end
from limosa.cli.main import entry
entry(sys.argv[1:])
"""
pytestmark = [pytest.mark.root, pytest.mark.criu, pytest.mark.timeout(300)]


def killed_at_the_end(desk: Desk, *words: object, program: str = KILLED_AT_THE_END) -> None:
    environment = desk.runtime.environment()
    del environment["HOME"]
    process = desk.node.popen([sys.executable, "-c", program, *words], env=environment)
    assert process.wait(120) == -signal.SIGKILL


def freezer_of(one: Container) -> str:
    """The folder of the cgroup that holds it still."""
    return frozen_by(Path(f"/proc/{one.pid}/cgroup").read_text(), Path("/proc/self/mountinfo").read_text())


def only_in_its_image(desk: Desk) -> None:
    """Its runtime has no container any more, and it goes on from the image."""
    assert desk.runtime.names() == []
    desk.limosa("verify", desk.image())
    desk.restore()
    desk.back().goes_on()


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
    there = desk.runtime.place / "killed"
    instead_of_runc(desk, f'case " $* " in *" kill "*|*" delete "*) [ -e {there} ] && kill -9 $$ ;; esac')
    return there


def instead_of_runc(desk: Desk, before: str) -> Path:
    """The podman gets a runc that does something before; the file that it is."""
    program = desk.runtime.place / "bin" / "runc"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\n{before}\nexec {desk.runtime.engines["runc"]} "$@"\n')
    program.chmod(0o755)
    conf = desk.runtime.place / ".config" / "containers" / "containers.conf"
    conf.write_text(conf.read_text().replace(str(desk.runtime.engines["runc"]), str(program)))
    return program


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


@each("podman-podman", "podman-all", "podman-thawed", "podman-forgotten")
def test_one_that_podman_had_begun_to_end_is_ended(desk: Desk, word: str) -> None:
    """podman that was killed over it calls it "stopping": its next ``rm`` would forget it while it runs."""
    noted = desk.runtime.place / "waits"
    once = f"[ -e {noted} ] || {{ touch {noted}; exec sleep 600; }}"
    instead_of_runc(desk, f'case " $* " in *" kill "*) {once} ;; esac')
    one = desk.job()
    one.goes_on()
    limosa = begin(desk, "checkpoint", desk.called(one), "--output", desk.image())
    until(noted.exists)
    folder = freezer_of(one)
    runtime = [pid for pid in descendants(limosa.pid, snapshot()) if pid != limosa.pid]
    own = [] if word == "podman" else [*workers(desk.node), limosa.pid]  # a worker that outlives limosa recovers it
    for pid in own + runtime:
        with contextlib.suppress(ProcessLookupError):  # touch ends
            os.kill(pid, signal.SIGKILL)
    assert limosa.wait(60) == (0 if word == "podman" else -signal.SIGKILL)
    if word == "thawed":
        thaw(folder)
    elif word == "forgotten":
        desk.runtime("rm", "--force", one.name)
        assert one.lives()
    (told,) = desk.says(0, "recover")["recovered"] or [{}]
    if word == "thawed":
        assert (told["state"], one.lives()) == ("running", True)
        assert "podman takes it for dead: podman kill ends it" in told["did"]
        desk.runtime("kill", one.name)
        until(lambda: not one.lives(), 10)
        desk.runtime("rm", one.name)
    elif word != "podman":
        assert told["state"] == "gone"
    assert not one.lives()
    only_in_its_image(desk)


@pytest.mark.parametrize("cgroups", cgroup_layouts(), indirect=True)
@each("runc-killed", "podman-killed", "containerd-killed")
def test_one_that_ended_while_it_stood_still_is_removed(cgroups: str, desk: Desk, word: str) -> None:
    """Its runtime calls it paused: its cgroup is frozen, whoever is in it."""
    one = desk.job()
    one.goes_on()
    words = ("checkpoint", desk.called(one), "--output", desk.image())
    killed_at_the_end(desk, *words, program=KILLED_AS_IT_WAS_COMMITTED)
    os.kill(one.pid, signal.SIGKILL)
    recovered(desk)
    assert not one.lives()
    only_in_its_image(desk)


@each("runc-anew", "podman-anew")
def test_one_that_was_started_anew_while_its_image_was_committed_stays(desk: Desk, word: str) -> None:
    one = desk.job()
    one.goes_on()
    if desk.runtime.name == "podman":
        again = ["podman kill {0}", "podman start {0}"]
    else:
        runc = f"runc --root {desk.runtime.place}/state"
        again = [
            f"{runc} delete --force {{0}}",
            f"{runc} run --detach --bundle {desk.runtime.place}/{{0}} {{0}} >/dev/null",
        ]
    program = STARTED_ANEW.replace("AGAIN", "; ".join(again).format(one.name))
    done = desk.node.run(
        [sys.executable, "-c", program, "checkpoint", desk.called(one), "--output", desk.image(), "-o", "json"],
        env=desk.runtime.environment(),
    ).json
    assert [one["id"] for one in done["warnings"]] == ["container-anew"]
    assert done["removed"] == []
    assert not one.lives()
    assert desk.back().lives()
    desk.limosa("verify", desk.image())


@each("containerd-ended", "containerd-living")
def test_a_task_whose_container_is_gone_is_in_the_way_as_long_as_it_lives(desk: Desk, word: str) -> None:
    one = desk.job()
    one.goes_on()
    desk.checkpoint(one, "--leave-running")
    if word == "ended":
        ends(one)
        until(lambda: desk.runtime.state(one.name) == "stopped")
    forget = f"Api({str(desk.runtime.socket)!r}, 'default').forget({one.name!r})"
    desk.node.run([sys.executable, "-c", f"from limosa.containers.containerd_api import Api; {forget}"])
    assert desk.runtime.names() == []
    if word == "living":
        assert "is there, and its container is gone" in desk.restore(rc=21)["error"]["message"]
        assert one.lives()
        ends(one)
        until(lambda: desk.runtime.state(one.name) == "stopped")
    desk.restore()
    desk.back().goes_on()


@each("podman-restore", "podman-layer", "podman-checkpoint")
def test_one_whose_files_podman_has_removed_is_removed(desk: Desk, word: str) -> None:
    """podman that was killed then says nothing of it but that it has it."""
    one = desk.job()
    one.goes_on()
    if word != "checkpoint":
        desk.checkpoint(one)
        killed_at_the_end(desk, "restore", desk.image(), program=KILLED_AS_IT_CAME_BACK)
        ends(desk.back())
    else:
        words = ("checkpoint", desk.called(one), "--output", desk.image())
        killed_at_the_end(desk, *words, program=KILLED_AS_IT_WAS_COMMITTED)
        thaw(freezer_of(one))
        ends(one)
    stored = desk.runtime.place / "graph" / "overlay-containers" / "containers.json"
    (noted,) = [each for each in json.loads(stored.read_text()) if one.name in each["names"]]
    if word == "layer":
        layers = desk.runtime.place / "graph" / "overlay-layers" / "layers.json"
        layers.write_text(json.dumps([each for each in json.loads(layers.read_text()) if each["id"] != noted["layer"]]))
    else:
        stored.write_text("[]")
    said = desk.runtime("container", "inspect", one.name, rc=125).stderr
    assert ("layer not known" if word == "layer" else "container not known") in said
    desk.says(10, "checkpoint", desk.called(one), "--output", desk.image("another"))
    recovered(desk)
    only_in_its_image(desk)


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
