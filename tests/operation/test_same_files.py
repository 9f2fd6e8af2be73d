"""What CRIU has mapped is compared with what was looked at; ``tests/e2e/test_e2e_exchanged.py`` does it with CRIU."""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from limosa.errors import NoWorkingCriu, Refused
from limosa.operation import same_files
from limosa.operation.same_files import Looked, seen
from limosa.process.criu.named import Named, Remapped, Socket


@pytest.mark.parametrize(("name", "fine"), [("/dev/nvidia0", True), ("/dev/nvidiactl", True), ("/data/weights", False)])
def test_zeroes_stand_for_gpu_memory_that_a_child_has_inherited_and_for_nothing_else(name: str, fine: bool) -> None:
    """Our plugin has CRIU map them: a DataLoader's worker has such mappings, and was refused on real GPUs."""
    looked: Any = Looked.__new__(Looked)
    looked._named = SimpleNamespace(names={7: name}, remapped={})
    looked._files = {name: seen(os.stat("/dev/null"))}
    looked._proc, looked._procs = os.stat("/proc").st_dev, []
    with mmap.mmap(-1, mmap.PAGESIZE) as zeroes:  # shared, as /dev/zero mapped shared is
        view = ctypes.c_char.from_buffer(zeroes)
        start = ctypes.addressof(view)
        path = f"/proc/self/map_files/{start:x}-{start + mmap.PAGESIZE:x}"
        assert os.readlink(path) == "/dev/zero (deleted)"
        reason = looked._other(os.getpid(), f"the mapping at {start:x}", 7, path)
        del view
    assert (reason is None) == fine


@pytest.mark.root
@pytest.mark.parametrize(
    ("owner", "uid", "inside", "fine"),
    [
        (4242, 4242, False, True),
        (0, 4242, False, False),
        (4243, 4242, False, False),
        (0, 4242, True, True),
        (4243, 0, False, True),
    ],
    ids=["the user's", "root's", "another's", "the job's", "a job of root's"],
)
def test_what_tells_of_a_process_tells_of_one_of_its_users(owner: int, uid: int, inside: bool, fine: bool) -> None:
    """A job had /proc/PID/mem of its user's process open, whose number is that of a program with root's rights now."""
    with subprocess.Popen(["/bin/sleep", "60"], user=owner, group=owner, extra_groups=[]) as process:
        try:
            named: Any = SimpleNamespace(names={7: f"/proc/{process.pid}/mem"}, processes={}, remapped={}, sockets=[])
            if inside:
                named.processes[process.pid] = ()
            manifest: Any = SimpleNamespace(job=SimpleNamespace(uid=uid, gid=uid), open_files=[], tree=[])
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(same_files, "named", lambda *_: named)
                looked = Looked(SimpleNamespace(manifest=manifest, criu_fd=-1, path=""))  # type: ignore[arg-type]
            with open(f"/proc/{process.pid}/mem", "r+b", buffering=0) as file:
                path = f"/proc/self/fd/{file.fileno()}"
                reason = looked._other(os.getpid(), "descriptor 3", 7, path)
        finally:
            process.kill()
    assert (reason is None) is fine


@pytest.mark.parametrize(
    ("at", "fine"),
    [("/a/b/c", True), ("/a/c", True), ("/c", True), ("/a/b", False), ("/a/b/c/c", False), ("/x/c", False)],
)
def test_a_folder_that_was_removed_is_made_at_its_name_or_above(at: str, fine: bool) -> None:
    """CRIU makes it where its own parents are gone too: in the nearest that is there."""
    assert same_files._is_folder_anew(at, "/a/b/c") is fine


@pytest.mark.parametrize(
    ("at", "owner", "fine"),
    [
        ("job/gone", None, True),
        ("job/gone.cr_link", None, True),
        ("job/gone", (4242, 4242), False),
        ("job/other", None, False),
        ("roots/gone", None, False),
        ("job/gone/gone", None, False),
    ],
)
def test_a_deleted_file_that_is_made_anew_is_at_its_own_name_and_its_owners(
    tmp_path: Path, at: str, owner: tuple[int, int] | None, fine: bool
) -> None:
    """A user who puts a link to /proc/PID/fd/N in its place has CRIU open somebody's deleted file."""
    looked: Any = Looked.__new__(Looked)
    looked._since = time.time() - 100
    name, path = f"{tmp_path}/job/gone", tmp_path / at
    path.parent.mkdir(parents=True)
    with open(path, "w+b") as file:
        path.unlink()
        info, link = os.fstat(file.fileno()), os.readlink(f"/proc/self/fd/{file.fileno()}")
        anew = Remapped("ghost", owner=owner or (info.st_uid, info.st_gid))
        assert looked._is_anew(info, link, anew, name) is fine


@pytest.mark.parametrize(("owner", "fine"), [(0, True), (1, False)], ids=["its owner's", "another's"])
def test_a_deleted_folder_that_is_made_anew_is_its_owners_who_need_not_be_the_jobs_user(
    tmp_path: Path, owner: int, fine: bool
) -> None:
    """Root has removed a job's folder in its spool, where the job still works."""
    looked: Any = Looked.__new__(Looked)
    looked._since, looked._uid = time.time() - 100, 4242
    info = tmp_path.stat()
    anew = Remapped("ghost", owner=(info.st_uid + owner, info.st_gid))
    assert looked._is_anew(info, f"{tmp_path} (deleted)", anew, str(tmp_path)) is fine


@pytest.mark.parametrize("what", ["sockets", "names"])
def test_without_a_guard_nothing_is_made_in_folders_of_others(what: str, tmp_path: Path) -> None:
    others = tmp_path / "others"
    others.mkdir(mode=0o777)
    others.chmod(0o777)
    for folder, refused in ((others, True), (Path("/run"), False)):
        looked: Any = Looked.__new__(Looked)
        name = str(folder / "gone" / "name")
        looked._named = Named(remapped={7: Remapped("ghost")})
        if what == "sockets":
            looked._named.sockets.append(Socket(name, 0, 0, outside=False))
        else:
            looked._named.names[7] = name
        if refused:
            with pytest.raises(NoWorkingCriu, match="others than root"):
                looked.need_guard()
        else:
            looked.need_guard()


USER = 4242


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder of root's that everybody can go to: pytest's own is root's alone."""
    folder = Path(tempfile.mkdtemp(prefix="limosa-same-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def _look_at(path: Path, owner: int, *, uid: int = USER, outside: bool = False) -> bool:
    try:
        same_files._look_at_socket(Socket(str(path), owner, owner, outside=outside), uid, uid)
    except Refused:
        return False
    return True


@pytest.mark.root
@pytest.mark.parametrize(("mode", "fine"), [(0o666, True), (0o600, False)])
def test_a_job_is_connected_to_what_its_user_may_connect_to(public: Path, mode: int, fine: bool) -> None:
    """As a program that logs to /dev/log is: the socket is root's, whoever's the job is."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as log:
        log.bind(str(public / "log"))
        (public / "log").chmod(mode)
        assert _look_at(public / "log", -1, outside=True) is fine
        public.chmod(0o700)
        assert not _look_at(public / "log", -1, outside=True)
        assert _look_at(public / "log", -1, uid=0, outside=True)


@pytest.mark.root
def test_a_socket_is_made_where_its_user_could_make_it(public: Path) -> None:
    assert not _look_at(public / "sock", USER)
    assert not _look_at(public / "gone" / "sock", USER)
    assert not _look_at(public / "sock", 0), "root's, in a user's job"
    assert _look_at(public / "sock", 0, uid=0)
    assert not _look_at(public / "sock", USER, uid=0)
    with socket.create_server(str(public / "sock"), family=socket.AF_UNIX):
        os.chown(public / "sock", USER, USER)
        assert _look_at(public / "sock", USER, uid=0), "root had made it there, and given it to him"
        assert not _look_at(public / "sock", USER)
    os.chown(public, USER, USER)
    assert _look_at(public / "sock", USER)
    assert _look_at(public / "other" / "sock", USER)
    (public / "other").write_text("root's own")
    assert not _look_at(public / "other", USER), "CRIU would move it aside"


def test_a_terminal_is_not_missing_where_somebody_else_has_its_number() -> None:
    """CRIU makes it anew; the cause is its own ("somebody else has the number …")."""
    looked = Looked.__new__(Looked)
    looked._named = Named()
    looked._files = {"/dev/pts/7": None, "/data/log": None}
    assert looked.in_the_way("somebody else has the number of a terminal that the job works on, /dev/pts/7") == []
    (reason,) = looked.in_the_way("Can't open file data/log on restore")
    assert (reason.id, reason.exit_code) == ("file-missing", 23)
