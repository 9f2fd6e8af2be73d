"""What ``limosa run --gpus`` preloads, and the file that says which GPUs a job sees."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from limosa.process import device_nodes, places
from limosa.process.belief import Processes
from limosa.process.identity import Identity
from limosa.process.records import RunRecord

TRIES = """
import errno, os, sys
def tried(path, flags=os.O_RDONLY, mode=0o777):
    try:
        os.close(os.open(path, flags, mode))
        return "opened"
    except OSError as error:
        return errno.errorcode[error.errno]
os.umask(0)
for path in ("/dev/nvidia70", "/dev/nvidia7", "/dev/nvidia071", "/dev/nvidiactl7", "/dev/nvidia7x", "/dev/nvidia"):
    print(path, tried(path))
made = sys.argv[1] + "/made"
print("made", tried(made, os.O_WRONLY | os.O_CREAT, 0o640), oct(os.stat(made).st_mode))
fd = os.open(sys.argv[1], os.O_WRONLY | os.O_TMPFILE, 0o600)
print("nameless", oct(os.fstat(fd).st_mode))
"""


def said(tmp_path: Path, path: str | None) -> dict[str, str]:
    env = {**os.environ, "LD_PRELOAD": str(device_nodes.LIBRARY)} | ({"LIMOSA_SEES": path} if path else {})
    done = subprocess.run(
        [sys.executable, "-c", TRIES, str(tmp_path)], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return dict(line.split(" ", 1) for line in done.stdout.splitlines())


@pytest.fixture
def listed(runtime: Path) -> tuple[dict[str, str], str]:
    return device_nodes.preload({"LD_PRELOAD": "/some.so"}, [7, 12])


def test_nodes_of_others_cannot_be_opened_and_everything_else_can(
    tmp_path: Path, listed: tuple[dict[str, str], str]
) -> None:
    env, path = listed
    assert env["LD_PRELOAD"].split(":") == ["/some.so", str(device_nodes.LIBRARY)]
    assert device_nodes.seen(path) == {7, 12}
    found = said(tmp_path, path)
    assert found.pop("made") == "opened 0o100640"
    assert found.pop("nameless") == "0o100600"
    assert found.pop("/dev/nvidia70") == "EPERM"
    assert found.pop("/dev/nvidia071") == "EPERM"
    assert set(found.values()) == {"ENOENT"}, "they are not there, which is for the kernel to say"


def test_without_a_list_nothing_is_hidden(tmp_path: Path, listed: tuple[dict[str, str], str]) -> None:
    _, path = listed
    device_nodes.show(path, [])
    assert said(tmp_path, path)["/dev/nvidia7"] == "EPERM"
    device_nodes.forget(path)
    assert device_nodes.seen(path) is None
    assert said(tmp_path, path)["/dev/nvidia7"] == "ENOENT"
    assert said(tmp_path, None)["/dev/nvidia7"] == "ENOENT"
    device_nodes.show(path, [3])
    assert device_nodes.seen(path) == {3}, "made anew, as after a restart of the machine"
    Path(path).write_text("1," + "9" * 5000 + ",x,2")
    assert device_nodes.seen(path) == {1, 2}


@pytest.mark.parametrize(
    "path", ["", "sees", "/etc/passwd", "/a/0/sees/../../x/0/sees/y", "/a/root/sees/x", "0/sees/x"]
)
def test_only_in_a_users_runtime_folder(path: str) -> None:
    assert device_nodes.owner(path) is None
    assert device_nodes.seen(path) is None
    with pytest.raises(OSError, match="runtime folder"):
        device_nodes.show(path, [0])


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that every user may look into."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@pytest.mark.root
def test_root_writes_with_the_rights_of_whose_folder_it_is(public: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path comes from users' records: it leads nowhere where they could not write themselves."""
    monkeypatch.setenv("LIMOSA_RUNTIME_DIR", str(public / "run"))
    places.own_place()
    folder = public / "run" / "users" / "limosa-4321"
    folder.mkdir()
    os.chown(folder, 4321, 4321)
    path = folder / "sees" / "list"
    device_nodes.show(str(path), [1])
    assert (path.stat().st_uid, device_nodes.seen(str(path))) == (4321, {1})
    (public / "own").mkdir(mode=0o775)  # root's, and of root's group
    (public / "own").chmod(0o775)
    (public / "own" / "list").write_text("7")
    path.unlink()
    path.parent.rmdir()
    path.parent.symlink_to(public / "own")
    assert not device_nodes.show(str(path), [1])
    assert os.geteuid() == 0
    assert [(one.name, one.read_text()) for one in (public / "own").iterdir()] == [("list", "7")]


@pytest.mark.root
def test_of_what_a_job_sees_its_owner_speaks_and_root(runtime: Path, start: Any) -> None:
    """Root that brings a user's job back notes it among root's records; a user says nothing of another's."""
    job = Identity.of(start("counter").pid)
    mine, theirs = (str(runtime / place / "sees" / "list") for place in ("0", "users/limosa-4321"))
    for sees, owner, counts in ((mine, 0, True), (theirs, 0, True), (theirs, 4321, False), (mine, 4321, False)):
        assert RunRecord(root=job, name="j", command=[], sees=sees).believed(owner, Processes()) is counts


@pytest.mark.root
def test_a_list_of_a_strangers_hides_nothing(tmp_path: Path, listed: tuple[dict[str, str], str]) -> None:
    """The folder's name may be somebody else's after a restart."""
    _, path = listed
    assert said(tmp_path, path)["/dev/nvidia70"] == "EPERM"
    os.chown(path, 4321, 4321)
    assert said(tmp_path, path)["/dev/nvidia70"] == "ENOENT"
    os.unlink(path)
    os.mkfifo(path)
    assert said(tmp_path, path)["/dev/nvidia70"] == "ENOENT"
