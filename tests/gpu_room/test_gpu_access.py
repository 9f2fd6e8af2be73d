"""Which GPUs a job can open: by node name and minor number, in its own view, as far as it may."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from recorded import gpu, machine

from limosa.errors import NoSuchProcess
from limosa.gpu.access import Credentials, allowed_by, openable, openable_under, opened

FOUR = [gpu(i) for i in range(4)]
ROOT = Credentials(0, frozenset({0}), override=True)
USER = Credentials(1000, frozenset({1000, 44}), override=False)
MAJOR = 511  # any: majors mean nothing


def node(root: Path, name: str, minor: int, mode: int = 0o666, major: int = MAJOR) -> Path:
    path = root / "dev" / name
    path.parent.mkdir(exist_ok=True)
    os.mknod(path, stat.S_IFCHR | mode, os.makedev(major, minor))
    path.chmod(mode)
    return path


def indices(root: Path, credentials: Credentials = USER, rules: list[str] | None = None) -> list[int]:
    return [g.index for g in openable_under(FOUR, root, credentials, rules)]


def test_only_gpus_whose_node_is_there_can_be_opened(tmp_path: Path):
    node(tmp_path, "nvidia0", 0)
    node(tmp_path, "nvidia2", 2)
    node(tmp_path, "nvidiactl", 255)
    assert indices(tmp_path) == [0, 2]


def test_the_node_is_named_by_nvmls_minor_number_not_by_the_index(tmp_path: Path):
    node(tmp_path, "nvidia7", 7)
    found = openable_under([gpu(0, minor=3), gpu(1, minor=7), gpu(2, minor=None)], tmp_path, USER)
    assert [g.index for g in found] == [1]


def test_a_node_that_is_covered_cannot_be_opened(tmp_path: Path):
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia0").touch()
    (tmp_path / "dev" / "nvidia1").mkdir()
    node(tmp_path, "nvidia2", 1)  # another GPU's node under this name
    node(tmp_path, "nvidia3", 3, major=1)  # /dev/null has minor 3
    assert indices(tmp_path) == []


def test_modes_and_owners_decide_unless_they_are_overridden(tmp_path: Path):
    node(tmp_path, "nvidia0", 0, 0o600)
    os.chown(node(tmp_path, "nvidia1", 1, 0o660), 0, 44)
    os.chown(node(tmp_path, "nvidia2", 2, 0o600), 1000, 0)
    node(tmp_path, "nvidia3", 3, 0o664)
    assert indices(tmp_path, USER) == [1, 2]
    assert indices(tmp_path, ROOT) == [0, 1, 2, 3]


def test_the_device_cgroup_decides_too(tmp_path: Path):
    for minor in range(3):
        node(tmp_path, f"nvidia{minor}", minor)
    rules = [f"c {MAJOR}:0 rw", f"c {MAJOR}:1 r", "b *:* rwm", "c 1:3 rwm"]
    assert indices(tmp_path, ROOT, rules) == [0]
    assert indices(tmp_path, ROOT, ["a *:* rwm"]) == [0, 1, 2]
    assert indices(tmp_path, ROOT, []) == []
    assert not allowed_by(["nonsense", "c 1 rw"], os.makedev(1, 3))


def test_credentials_are_read_from_a_real_process():
    mine = Credentials.of(os.getpid())
    assert (mine.uid, mine.override) == (os.getuid(), os.getuid() == 0)
    assert os.getgid() in mine.groups
    with pytest.raises(NoSuchProcess):
        Credentials.of(2**22 + 1)


IN_OWN_VIEW = """
import os, sys, time
os.mkdir(sys.argv[1] + "/dev")
os.mknod(sys.argv[1] + "/dev/nvidia1", 0o20666, os.makedev(511, 1))
os.chroot(sys.argv[1]); os.chdir("/")
print("ready", flush=True)
time.sleep(60)
"""


def test_the_nodes_that_a_process_holds_open_are_named(tmp_path: Path):
    (tmp_path / "nvidia2").touch()
    (tmp_path / "nvidia22").touch()
    with open(tmp_path / "nvidia2", "rb"), open(tmp_path / "nvidia22", "rb"):
        assert [g.index for g in opened(machine(*FOUR), os.getpid())] == [2]
    assert opened(machine(*FOUR), os.getpid()) == []
    with pytest.raises(NoSuchProcess):
        opened(machine(*FOUR), 2**22 + 1)


def test_a_jobs_own_view_of_dev_counts_not_ours(tmp_path: Path):
    job = subprocess.Popen([sys.executable, "-c", IN_OWN_VIEW, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert job.stdout is not None
        assert job.stdout.readline() == "ready\n"
        assert [g.index for g in openable(machine(*FOUR), job.pid)] == [1]
        assert openable(machine(*FOUR), os.getpid()) == openable_under(FOUR, Path("/"), Credentials.of(os.getpid()))
    finally:
        job.kill()
        job.wait()
    with pytest.raises(NoSuchProcess):
        openable(machine(*FOUR), job.pid)
