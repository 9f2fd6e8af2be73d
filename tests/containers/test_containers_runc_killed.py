"""A runc that was killed while it restored has left the container's root file system mounted in its notes."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from limosa.containers import runc_leftovers
from limosa.containers.calls import Said
from limosa.containers.podman import Podman
from limosa.containers.runc import Runc
from limosa.containers.runtime import Kept, end
from limosa.errors import FailedUndone
from limosa.image import ContainerRecord
from limosa.process.identity import Identity

pytestmark = [pytest.mark.root, pytest.mark.timeout(300)]


@pytest.fixture
def left(tmp_path: Path) -> Iterator[Path]:
    """The folder of a container, in which a root file system is mounted."""
    folder, rootfs = tmp_path / "state" / "one", tmp_path / "rootfs"
    for path in (folder / "criu-root", rootfs):
        path.mkdir(parents=True)
    (rootfs / "file").write_text("words")
    for _ in range(2):
        subprocess.run(["mount", "--bind", rootfs, folder / "criu-root"], check=True)
    yield folder
    while not subprocess.run(
        ["umount", "--lazy", folder / "criu-root"], check=False, stderr=subprocess.DEVNULL
    ).returncode:
        pass
    assert (rootfs / "file").read_text() == "words"


def test_the_folder_goes_and_what_was_mounted_in_it_stays(left: Path) -> None:
    os.mkfifo(left / "exec.fifo")
    assert runc_leftovers.begun(str(left.parent), "one")
    runc_leftovers.take_away(str(left.parent), "one")
    assert not left.exists()
    runc_leftovers.take_away(str(left.parent), "one")


def test_one_with_a_state_is_unmounted_and_not_removed(left: Path) -> None:
    (left / "state.json").write_text("{}")
    assert not runc_leftovers.begun(str(left.parent), "one")
    runc_leftovers.take_away(str(left.parent), "one")
    assert os.listdir(left / "criu-root") == ["file"]
    runc_leftovers.unmount_root(str(left.parent), "one")
    assert os.listdir(left / "criu-root") == []
    assert (left / "state.json").exists()


@pytest.mark.parametrize(("started", "goes"), [(7, True), (8, False)])
def test_one_with_a_state_goes_where_it_is_of_a_container_that_has_ended(left: Path, started: int, goes: bool) -> None:
    """Not where somebody has made another one of that id since."""
    note = {"init_process_pid": 1 << 22, "init_process_start": started}
    (left / "state.json").write_text(json.dumps(note))
    runc_leftovers.take_away(str(left.parent), "one", ended=Identity(1 << 22, 7))
    assert left.exists() is not goes


def test_a_container_cannot_say_that_a_runc_is_at_work() -> None:
    """What it calls its programs, and what it starts them with, is no word about another container."""
    name, program = f"train-{secrets.token_hex(4)}", os.path.realpath(sys.executable)
    runc = Runc(program, {}, [])
    words = [program, "-c", "print(flush=True); import time; time.sleep(600)", name]
    for before, at_work in ((["unshare", "--pid", "--fork", "--kill-child"], False), ([], True)):
        with subprocess.Popen([*before, *words], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            try:
                assert runc._at_work(name) is at_work
            finally:
                process.kill()


def test_a_process_that_has_the_pid_of_one_that_has_ended_is_left_alone() -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        try:
            end(Identity(process.pid, 1))
            assert process.poll() is None
            end(Identity.of(process.pid))
            assert process.wait(10) == -signal.SIGKILL
        finally:
            process.kill()


def test_a_volume_that_somebody_else_has_made_is_not_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """podman says so: it was not there when the restore began."""
    called: list[tuple[str, ...]] = []

    def run(*words: str, **_: object) -> Said:
        called.append(words)
        if words[1] == "restore":
            return Said(125, b"", "Error: volume with name data already exists. Use --ignore-volumes to not restore it")
        return Said(1 if words[1] == "exists" else 0, b"", "")

    podman = Podman("/nowhere/podman", {}, [])
    monkeypatch.setattr(podman, "_run", run)
    monkeypatch.setattr(podman, "find", lambda _: None)
    record = ContainerRecord(runtime="podman", id="1" * 64, name="one", volumes=["data", "own"])
    kept = Kept(criu_folder="", images_fd=-1, work_fd=-1)
    with pytest.raises(FailedUndone):
        podman.bring_back(record, "another", "", kept)
    monkeypatch.setattr(podman, "_exists", lambda *_: True)
    monkeypatch.setattr(podman, "_made_at", lambda _: 5.0)
    monkeypatch.setattr(podman, "_run", lambda *words: called.append(words) or Said(0, b"", ""))
    podman.remove_volumes(["data", "own"], 1.0, 9.0)
    assert [words[-1] for words in called if words[:2] == ("volume", "rm")] == ["own"]


def test_what_is_not_of_runc_is_not_removed(left: Path) -> None:
    (left / "other").mkdir()
    (left / "other" / "file").write_text("")
    with pytest.raises(FailedUndone, match="not empty"):
        runc_leftovers.take_away(str(left.parent), "one")
    assert (left / "other" / "file").exists()


@pytest.mark.parametrize("name", ["..", "two", "../state/one", "link"])
def test_no_other_folder_is_touched(left: Path, name: str) -> None:
    (left.parent / "link").symlink_to(left)
    runc_leftovers.take_away(str(left.parent), name)
    with contextlib.suppress(FailedUndone):
        runc_leftovers.unmount_root(str(left.parent), name)
    assert os.listdir(left / "criu-root") == ["file"]


def test_nothing_of_somebody_elses_is_touched(left: Path) -> None:
    os.chown(left.parent, 1001, 1001)
    assert not runc_leftovers.begun(str(left.parent), "one")
    with pytest.raises(FailedUndone):
        runc_leftovers.unmount_root(str(left.parent), "one")
    assert os.listdir(left / "criu-root") == ["file"]
