"""Containers that would deceive, or hold up, root's limosa outside of them."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from containers.images import make_image
from containers.runtimes import Podman, Runc, bundle_config
from soft_node import Answer

from limosa.cdi import Libraries, place, shim_spec, write_spec
from limosa.containers import Container, Containers
from limosa.containers import filter as filters
from limosa.containers.freezer import freeze, freezer_of, thaw
from limosa.native import build
from limosa.parking.shim import MOST_PIECES
from limosa.process.cgroups import cgroup_folders
from limosa.process.identity import Identity
from limosa.process.namespaces import Pids, inside

HOLE = 8 << 30
LET, NOT_LET = "No such device or address", "Operation not permitted"  # no driver has that number; the filter
pytestmark = [pytest.mark.root, pytest.mark.timeout(600)]


def folder_of(pid: int, controller: str) -> Path:
    """The cgroup by which such a controller acts on a process."""
    text, mounts = Path(f"/proc/{pid}/cgroup").read_text(), Path("/proc/self/mountinfo").read_text()
    return Path(next(folder for _, folder, _ in cgroup_folders(text, mounts, controller)))


def nested(pid: int, controller: str, cgroup: str) -> Path:
    """Moves a process into a cgroup below its container's that is called like the whole way to that; returns that."""
    own = folder_of(pid, controller)
    inner = Path(f"{own}/inner{cgroup}")
    inner.mkdir(parents=True)
    (inner / "cgroup.procs").write_text(str(pid))
    return own


def limosa(runtime: Podman | Runc, *words: object, rc: int | None = 0) -> Answer:
    """The command line, where it finds the runtime's program."""
    return runtime.node.limosa(*words, rc=rc, env=configured(runtime))


def configured(runtime: Podman | Runc) -> dict[str, str]:
    env = runtime.environment()
    del env["HOME"]
    return env


@pytest.fixture
def noted(runc: Runc, monkeypatch: pytest.MonkeyPatch) -> Runc:
    monkeypatch.setenv("LIMOSA_CONTAINER_STATE", str(runc.place / "state"))
    return runc


def test_an_image_cannot_name_its_containers(podman: Podman, rootfs: Path, tmp_path: Path) -> None:
    notes = {
        "io.container.manager": "x",
        "io.kubernetes.container.name": "train",
        "io.kubernetes.pod.name": "web",
        "nerdctl/name": "train",
    }
    podman.load(make_image(tmp_path / "liar.tar", rootfs, "localhost/liar:1", env=("LIAR=1",), annotations=notes))
    one = podman.start("/bin/sleep", 1000, gpus=None, image="localhost/liar:1")
    (told,) = podman("inspect", one.id).json
    assert notes.items() <= told["Config"]["Annotations"].items(), "podman takes them from the image"
    found = Containers().of(one.pid)
    assert found is not None
    assert (found.runtime, found.name, found.pod, found.id) == ("podman", one.name, "", one.id)


def test_a_container_is_frozen_by_its_own_cgroup(noted: Runc) -> None:
    one = noted.start("/bin/sh", "-c", "sleep 1000 & exec sleep 1000", gpus=None)
    found = Containers().of(one.pid)
    assert found is not None
    own = nested(one.pid, "freezer", found.cgroup)
    again = Containers().of(one.pid)
    assert again == found
    freezer = freezer_of(Identity.of(one.pid), found)
    assert freezer == str(own)
    assert freezer_of(Identity.of(one.pid), Container(runtime="runc", id="x", cgroup="/other")) == ""
    freeze(freezer)
    thaw(freezer)


def test_a_container_keeps_no_gpu_by_a_cgroup_of_its_own(noted: Runc) -> None:
    one = noted.start("/job", 16, 20, name="train")
    one.goes_on()
    found = Containers().of(one.pid)
    assert found is not None
    own = nested(one.pid, "devices", found.cgroup)
    noted.node.limosa("move", "runc:train", "--to", 1)
    one.goes_on()
    say = "echo $$ > {}/cgroup.procs && : < /dev/nvidia{}"
    said = [noted.node.run(["sh", "-c", say.format(own, gpu)], rc=None).stderr.strip() for gpu in (0, 1)]
    assert [words.rpartition(": ")[2] for words in said] == [NOT_LET, LET], said


def test_somebody_elses_filter_that_begins_like_ours_is_not_taken_apart() -> None:
    pack = filters._INSTRUCTION.pack
    own = pack(0xB7, 0, 0, 1) + pack(0x95, 0, 0, 0)
    before = filters.Changes(frozenset({os.makedev(195, 1)}), frozenset({os.makedev(195, 0)}))
    assert filters._split(filters._prefix(before) + own) == (before, own)
    for length in (2, 3, 8, 9, 10):
        code = pack(0xB7, 0, 0, filters._MARK) + pack(0xB7, 0, 0, length) + pack(0x95, 0, 0, -7) * length
        assert filters._split(code) == (filters.Changes(), code)


def test_a_checkpoint_of_a_file_with_a_hole_can_be_broken_off(podman: Podman, tmp_path: Path) -> None:
    script = f"dd if=/dev/zero of=/hole bs=1 seek={HOLE} count=0; echo made; exec sleep 1000"
    one = podman.start("/bin/sh", "-c", script, gpus=None)
    one.wait_for("made")
    words = [sys.executable, "-m", "limosa", "checkpoint", f"podman:{one.name}", "--output", tmp_path / "image"]
    process: Any = podman.node.popen(words, env=configured(podman), stderr=subprocess.PIPE, text=True)
    changes, most = podman.place / f"graph/overlay-containers/{one.id}/userdata/rootfs-diff.tar", 0
    end = time.monotonic() + 120
    while process.poll() is None:
        assert time.monotonic() < end
        size = changes.stat().st_size if changes.exists() else 0
        if size and not most:
            process.send_signal(signal.SIGINT)
        most = max(most, size)
        time.sleep(0.02)
    assert process.returncode == 22, process.stderr.read()
    assert 0 < most < HOLE
    assert not changes.exists()
    assert not (tmp_path / "image").exists()
    assert one.run("echo", "here").stdout == "here\n"


def test_the_hook_opens_nothing_but_a_file(libraries: None, tmp_path: Path) -> None:
    bundle, opened = tmp_path / "bundle", threading.Event()
    (bundle / "rootfs/etc").mkdir(parents=True)
    (bundle / "config.json").write_text(json.dumps({"root": {"path": "rootfs"}}))
    pipe, mine = bundle / "rootfs/etc/ld.so.preload", tmp_path / "list"
    mine.write_text("/lib/x.so\n")
    os.mkfifo(pipe)  # whoever opens one for writing is told that somebody reads; a device may do more

    def write() -> None:
        os.close(os.open(pipe, os.O_WRONLY))
        opened.set()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        hook = ["/usr/bin/unshare", "--mount", build.CDI / build.PRELOAD_HOOK, mine, tmp_path]
        state = json.dumps({"bundle": str(bundle)})
        ran = subprocess.run(hook, input=state, text=True, capture_output=True, timeout=60, check=False)
        assert (ran.returncode, ran.stderr) == (0, "")
        assert not opened.wait(0.5)
        assert stat.S_ISFIFO(pipe.lstat().st_mode)
    finally:
        os.close(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK))
        writer.join()


@pytest.mark.criu
def test_a_link_in_a_users_folder_brings_no_other_folder_into_a_container(noted: Runc, tmp_path: Path) -> None:
    theirs, secret = tmp_path / "theirs", tmp_path / "secret"
    for folder in (theirs, theirs / "data", secret):
        folder.mkdir()
    (theirs / "data/file").write_text("theirs")
    (secret / "file").write_text("secret")
    for path in (theirs, theirs / "data", theirs / "data/file"):
        os.chown(path, 1001, 1001)
    name = f"train-{os.getpid()}"
    config = bundle_config(name, noted.parent, ["/bin/sh"], None)
    mount = {"destination": "/data", "type": "bind", "source": str(theirs / "data"), "options": ["rbind", "rw"]}
    noted.start_job("/bin/sleep", 1000, gpus=None, name=name, mounts=[*config["mounts"], mount])
    limosa(noted, "checkpoint", f"runc:{name}", "--output", tmp_path / "image")
    (theirs / "data").rename(theirs / "before")
    (theirs / "data").symlink_to(secret)
    os.chown(theirs / "data", 1001, 1001, follow_symlinks=False)
    said = limosa(noted, "restore", tmp_path / "image", rc=None)
    assert said.rc == 21, said
    assert f"{theirs}/data is a link of uid 1001" in said.stderr
    assert noted.names() == []
    os.chown(theirs / "data", 0, 0, follow_symlinks=False)  # root's own links lead where they lead
    limosa(noted, "restore", tmp_path / "image")
    assert noted.known(name).run("cat", "/data/file").stdout == "secret"


@pytest.mark.criu
@pytest.mark.parametrize("way", ["folder", "file", "own"])
def test_no_link_leads_out_by_what_criu_has_open(noted: Runc, tmp_path: Path, way: str) -> None:
    """While CRIU makes a process anew, that has the image's folder open, and all of the machine is above that."""
    theirs, secret = tmp_path / "theirs", tmp_path / "secret"
    for folder in (theirs, theirs / "d", secret):
        folder.mkdir()
        (folder / "f").write_text("secret")
    config = bundle_config("", noted.parent, ["/bin/sh"], None)
    mount = {"destination": "/data", "type": "bind", "source": str(theirs), "options": ["rbind", "rw"]}
    script = {
        "folder": "cd /data/d && exec sleep 1000",
        "file": "exec 5<>/data/d/f && exec sleep 1000",
        "own": "mkdir /d && cd /d && exec sleep 1000",
    }[way]
    name = f"train-{os.getpid()}"
    one = noted.start_job("/bin/sh", "-c", f"'{script}'", gpus=None, name=name, mounts=[*config["mounts"], mount])
    inside_ = Path(f"/proc/{one.pid}/root")
    end = time.monotonic() + 60
    while Path(f"/proc/{one.pid}/comm").read_text() != "sleep\n":
        assert time.monotonic() < end
        time.sleep(0.02)
    limosa(noted, "checkpoint", "--leave-running", f"runc:{name}", "--output", tmp_path / "image")
    moved = inside_ if way == "own" else theirs
    (moved / "d").rename(moved / "was")
    (moved / "d").symlink_to(f"/proc/self/fd/126{'/..' * 12}{secret}")
    noted("delete", "--force", one.id)
    said = limosa(noted, "restore", tmp_path / "image", rc=None)
    assert "leads through a symbolic link of somebody else's" in said.stderr, said
    assert said.rc in (21, 23)
    assert noted.names() == []
    if way != "own":
        (theirs / "d").unlink()
        (theirs / "was").rename(theirs / "d")
        limosa(noted, "restore", tmp_path / "image")
        assert noted.known(name).run("echo", "here").stdout == "here\n"


def test_a_container_may_tell_of_as_many_processes_as_it_likes(noted: Runc) -> None:
    one = noted.start("/bin/sh", "-c", "sleep 1000 & exec sleep 1000", gpus=None)
    pids, begun = Pids(one.pid), time.monotonic()
    found = pids.all_here({pid: pid for pid in range(1, MOST_PIECES)})
    assert time.monotonic() < begun + 30, "it looks at all processes for each"
    assert (found[1], pids.here(1), pids.here(MOST_PIECES)) == (one.pid, one.pid, 0)
    child = int(Path(f"/proc/{one.pid}/task/{one.pid}/children").read_text())
    assert found[inside(child)] == child


def test_no_spec_is_written_where_another_user_could_change_it(tmp_path: Path) -> None:
    theirs, elsewhere = tmp_path / "theirs", tmp_path / "elsewhere"
    for folder in (theirs, elsewhere):
        folder.mkdir()
    (theirs / "link").symlink_to(elsewhere)
    for path in (theirs, theirs / "link"):
        os.chown(path, 1001, 1001, follow_symlinks=False)
    spec = shim_spec(Libraries(tmp_path, there=True))
    for path in (theirs / "spec.json", theirs / "link/spec.json"):
        with pytest.raises(PermissionError, match="others can change"):
            write_spec(spec, path)
    assert os.listdir(theirs) == ["link"]
    assert os.listdir(elsewhere) == []
    assert write_spec(spec, elsewhere / "spec.json")


def test_libraries_stay_where_it_takes_too_long_to_see_who_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "0123456789abcdef"
    folder.mkdir()
    assert place.mounted(tmp_path) == set()
    monkeypatch.setattr(place, "_LOOK_SECONDS", 0.0)
    assert place.mounted(tmp_path) == {folder}
