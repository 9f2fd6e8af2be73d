"""Where root's and users' folders are, who can be in whose way there: real users, as root."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import as_user

from limosa.errors import FailedUndone, LimosaError, PermissionDenied
from limosa.process import openat, places

pytestmark = pytest.mark.root
ADA, EVE = 61001, 61002


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A ``run`` that is root's and a ``tmp`` that is everybody's, in place of those of this machine."""
    path = Path(tempfile.mkdtemp(prefix="test-places-"))
    path.chmod(0o755)
    (path / "run").mkdir(mode=0o755)
    (path / "tmp").mkdir()
    (path / "tmp").chmod(0o1777)
    monkeypatch.delenv("LIMOSA_RUNTIME_DIR")
    monkeypatch.setattr(places, "RUN", path / "run" / "limosa")
    monkeypatch.setattr(places, "TMP", path / "tmp")
    yield path
    shutil.rmtree(path)


def own(kind: str = "jobs") -> str:
    return str(places.own_folder(kind))


def seen(kind: str = "jobs") -> list[tuple[int, str]]:
    with places.folders(kind) as found:
        return [(f.uid, f.path.parent.name) for f in found]


@contextlib.contextmanager
def no_descriptors_left(but: int = 0) -> Iterator[None]:
    """This process may open no more than that; the hard limit is the soft one, since root may raise it."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(map(int, os.listdir("/proc/self/fd"))) + 1 + but
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("limosa.process.limits._set", lambda soft: None)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most if but else 3, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_root_and_users_have_each_a_folder_that_all_can_read_and_nobody_else_write(machine: Path) -> None:
    assert own() == str(machine / "run/limosa/0/jobs")
    assert as_user(ADA, own) == str(machine / f"tmp/limosa-{ADA}/jobs")
    for path in ("run/limosa", "run/limosa/0", "run/limosa/0/jobs", f"tmp/limosa-{ADA}", f"tmp/limosa-{ADA}/jobs"):
        assert mode(machine / path) == 0o755
    assert seen() == [(0, "0"), (ADA, f"limosa-{ADA}")]
    assert as_user(ADA, seen) == [(ADA, f"limosa-{ADA}"), (0, "0")]
    assert as_user(EVE, seen) == [(0, "0"), (ADA, f"limosa-{ADA}")]


def test_a_user_whose_name_is_taken_gets_another_and_finds_it_again(machine: Path) -> None:
    taken = machine / f"tmp/limosa-{ADA}"
    as_user(EVE, lambda: taken.mkdir(mode=0o777))
    first = as_user(ADA, own)
    assert first.startswith(f"{taken}.")
    assert as_user(ADA, own) == first
    assert [uid for uid, _ in seen()] == [ADA]
    assert as_user(EVE, own) == str(machine / f"tmp/limosa-{EVE}/jobs")
    taken.rmdir()
    assert as_user(ADA, own) == first, "what it has remembered is there"


@pytest.mark.parametrize("how", ["link", "file", "pipe", "folder"])
def test_what_is_in_the_way_of_a_users_folder_stops_nobody(machine: Path, how: str) -> None:
    taken, bait = machine / f"tmp/limosa-{ADA}", machine / "tmp/bait"
    bait.mkdir()
    make = {
        "link": lambda: taken.symlink_to(bait),
        "file": lambda: void(taken.write_text("")),
        "pipe": lambda: os.mkfifo(taken),
        "folder": taken.mkdir,
    }
    as_user(EVE, make[how])
    assert Path(as_user(ADA, own)).parent.name.startswith(f"limosa-{ADA}.")
    assert list(bait.iterdir()) == []
    assert [uid for uid, _ in seen()] == [ADA]


def void(_: object) -> None:
    """Gives nothing back."""


def test_folders_that_others_may_write_to_or_that_name_another_or_no_user_do_not_count(machine: Path) -> None:
    tmp = machine / "tmp"

    def make() -> None:
        for name in (f"limosa-{ADA}", f"limosa-0{EVE}", f"limosa-{EVE}.x", "limosa-", "limosa-0", f"limosa-{EVE}x"):
            (tmp / name / "jobs").mkdir(parents=True)
        (tmp / f"limosa-{EVE}" / "jobs").mkdir(parents=True)
        (tmp / f"limosa-{EVE}").chmod(0o777)
        (tmp / f"limosa-{EVE}.00000000").symlink_to(tmp / "limosa-")

    as_user(EVE, make)
    assert seen() == []
    (tmp / f"limosa-{EVE}").chmod(0o755)
    assert seen() == [(EVE, f"limosa-{EVE}")]
    (tmp / f"limosa-{EVE}" / "jobs").chmod(0o775)
    assert seen() == []


def test_roots_folder_is_closed_and_what_others_left_there_is_moved_away(machine: Path) -> None:
    """As an older version left it: 1777, and somebody has been there first."""
    run = machine / "run/limosa"
    run.mkdir()
    run.chmod(0o1777)

    def squat() -> None:
        (run / "0" / "claims").mkdir(parents=True)
        (run / "0" / "claims" / "x.json").write_text("{}")
        (run / str(ADA)).mkdir()

    as_user(EVE, squat)
    assert own("claims") == str(run / "0/claims")
    assert list(Path(own("claims")).iterdir()) == []
    assert (mode(run), (run / "0").stat().st_uid) == (0o755, 0)
    assert seen("claims") == [(0, "0")]
    run.chmod(0o1777)
    (run / "0" / "claims").rmdir()
    (run / "0").rmdir()
    as_user(EVE, lambda: (run / "0").symlink_to("/etc"))
    assert own("claims") == str(run / "0/claims")
    assert not (run / "0").is_symlink()


def test_a_folder_of_another_users_is_no_runtime_folder_of_roots(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, inside = machine / "tmp/theirs", machine / "tmp/theirs/roots"
    as_user(EVE, theirs.mkdir)
    inside.mkdir()
    for path in (theirs, inside):
        monkeypatch.setenv("LIMOSA_RUNTIME_DIR", str(path))
        with pytest.raises(PermissionDenied):
            own()
    assert not list(inside.iterdir()), "nothing is made, whose name he could exchange before it gets its mode"
    monkeypatch.setenv("LIMOSA_RUNTIME_DIR", str(machine / "tmp"))
    with pytest.raises(PermissionDenied, match="others may make folders"):
        own()
    assert mode(machine / "tmp") == 0o1777


def test_with_a_setting_root_makes_a_place_for_users(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIMOSA_RUNTIME_DIR", str(machine / "chosen"))
    assert own() == str(machine / "chosen/0/jobs")
    assert as_user(ADA, own) == str(machine / f"chosen/users/limosa-{ADA}/jobs")
    assert seen() == [(0, "0"), (ADA, f"limosa-{ADA}")]


def test_thousands_of_names_cost_moments_and_hide_nobody_who_has_a_process(machine: Path) -> None:
    tmp = machine / "tmp"

    def flood() -> None:
        for number in range(5_000):
            os.mkdir(tmp / f"limosa-{100_000 + number}")
        for number in range(200):
            os.makedirs(tmp / f"limosa-{EVE}.{number:08x}/jobs")

    as_user(ADA, own)
    as_user(EVE, flood)
    sleeper = subprocess.Popen(["sleep", "60"], user=ADA, group=ADA, extra_groups=[])
    try:
        begun = time.process_time()  # it waits for nobody
        found = seen()
        assert time.process_time() - begun < 0.5
        assert (ADA, f"limosa-{ADA}") in found
        assert len([uid for uid, _ in found if uid == EVE]) <= 4
    finally:
        sleeper.kill()
        sleeper.wait()


def squatted(machine: Path, number: int) -> str:
    """EVE has made ADA's name before her, and then names of the form that ADA's folder has; ADA's folder."""
    as_user(EVE, (machine / f"tmp/limosa-{ADA}").mkdir)
    mine: str = as_user(ADA, own)
    as_user(EVE, lambda: void([os.mkdir(f"{machine}/tmp/limosa-{ADA}.{n:08x}") for n in range(number)]))
    return mine


def test_names_that_a_stranger_makes_hide_nobodys_own_folder(machine: Path) -> None:
    """At 2,000 names, whoever's they were, the listing stopped: she got a new folder, and had no claim any more."""
    mine = squatted(machine, 5_000)
    assert as_user(ADA, own) == mine
    assert len([name for name in os.listdir(machine / "tmp") if (machine / "tmp" / name).stat().st_uid == ADA]) == 1
    name = Path(mine).parent.name
    assert (ADA, name) in as_user(ADA, seen)
    assert seen() == [(ADA, name)]
    with places.folders("jobs", ADA, whole=True) as found:
        assert [str(folder.path) for folder in found] == [mine]


@pytest.mark.parametrize("limit", ["_MOST_LISTED", "_MOST_BYTES"])
def test_among_any_number_of_names_one_users_folder_is_found(
    machine: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    """Also by himself, where he asks for everybody's; and who has none gets one."""
    mine = squatted(machine, 50)
    monkeypatch.setattr(places, limit, 1)

    def of(uid: int | None) -> list[str]:
        with places.folders("jobs", uid, whole=True) as found:
            return [str(folder.path) for folder in found if folder.uid == ADA]

    assert of(ADA) == [mine]
    assert as_user(ADA, lambda: of(None)) == [mine]
    assert as_user(ADA, own) == mine
    newcomer = 4244
    assert of(newcomer) == []
    assert as_user(newcomer, own) == f"{machine}/tmp/limosa-{newcomer}/jobs"


def test_where_looking_takes_too_long_it_cannot_be_told_what_is_there(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    squatted(machine, 50)
    before = sorted(os.listdir(machine / "tmp"))

    def refused(uid: int | None = ADA) -> None:
        with pytest.raises(FailedUndone, match="too many entries"), places.folders("jobs", uid, whole=True):
            pass

    def no_new_one() -> None:
        refused()
        refused(None)
        with pytest.raises(FailedUndone, match="too many entries"):
            own()

    with places.folders("jobs", ADA, whole=True) as found:
        mine = [folder.path for folder in found]
    monkeypatch.setattr(places, "_LISTING_SECONDS", -1)
    with places.folders("jobs", ADA, whole=True) as found:  # whom this process has found before it need not look for
        assert [folder.path for folder in found] == mine
    places._found.clear()
    refused()
    with places.folders("jobs", whole=True):  # nobody stops all others' commands so
        pass
    as_user(ADA, no_new_one)
    assert sorted(os.listdir(machine / "tmp")) == before


def test_whoever_has_the_plain_name_is_found_among_any_number_of_names(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody makes a running operation fail by making names."""
    own_one = as_user(ADA, own)
    squatted_by_eve = [machine / f"tmp/limosa-{ADA}.{n:08x}" for n in range(9)]
    as_user(EVE, lambda: [path.mkdir() for path in squatted_by_eve] and None)
    monkeypatch.setattr(places, "_LISTING_SECONDS", -1)
    with places.folders("jobs", ADA, whole=True) as found:
        assert [str(folder.path) for folder in found] == [own_one]


def test_a_folder_is_opened_for_its_user_alone_and_followed_by_descriptor(machine: Path) -> None:
    as_user(ADA, own)
    with places.folders("jobs", ADA) as found:
        (folder,) = found
        away = machine / "tmp/away"
        as_user(ADA, lambda: (machine / f"tmp/limosa-{ADA}").rename(away))
        as_user(ADA, lambda: (machine / f"tmp/limosa-{ADA}").symlink_to("/etc"))
        assert os.fstat(folder.fd).st_ino == (away / "jobs").stat().st_ino
    for uid in (ADA, EVE):
        with places.folders("jobs", uid) as found:
            assert found == []


def test_a_mount_in_a_users_folder_is_not_entered(machine: Path) -> None:
    """It may be a file system that never answers."""
    path = Path(as_user(ADA, own))
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"uid={ADA},mode=755", "none", str(path)], check=True, timeout=60)
    try:
        assert seen() == []
    finally:
        subprocess.run(["umount", str(path)], check=True, timeout=60)
    assert seen() == [(ADA, f"limosa-{ADA}")]


def test_a_name_is_one_name(tmp_path: Path) -> None:
    with openat.closing(os.open(tmp_path, os.O_RDONLY)) as fd:
        for name in ("", ".", "..", "a/b", "/etc/passwd", "a\0b"):
            with pytest.raises(OSError, match="Invalid argument"):
                openat.open_in(fd, name, os.O_RDONLY)


def test_a_folder_of_ones_own_that_others_may_write_to_is_refused_with_what_to_type(machine: Path) -> None:
    def refused() -> str:
        places.own_place().chmod(0o777)
        try:
            places.own_place()
        except LimosaError as error:
            return error.hint
        return ""

    assert as_user(ADA, refused).endswith(f"chmod 755 {machine}/tmp/limosa-{ADA}")


def test_that_nothing_can_be_opened_is_not_that_nothing_is_there(machine: Path) -> None:
    """With no descriptor left ``recover`` found no vault, and let a job's memory be held on, or called it lost."""
    own()
    with no_descriptors_left():
        with pytest.raises(FailedUndone, match="Too many open files"), places.folders("jobs", whole=True):
            pass
        with pytest.raises(FailedUndone, match="Too many open files"), places.folders("vault", ADA, whole=True):
            pass
        assert seen() == []


def test_what_a_users_own_file_system_answers_concerns_nobody_else(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own()
    as_user(ADA, own)
    real = places.open_folder_in

    def odd(folder: int, name: str, uid: int) -> int:
        if uid == ADA:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real(folder, name, uid)

    monkeypatch.setattr(places, "open_folder_in", odd)
    for uid in (None, ADA):
        with places.folders("jobs", uid, whole=True) as found:
            assert [f.uid for f in found] == ([0] if uid is None else [])


def test_more_folders_than_can_be_opened_hide_none_of_the_callers_own(machine: Path) -> None:
    """Whoever has many user ids may make as many folders."""
    own()
    as_user(EVE, own)
    for uid in range(ADA - 100, ADA):
        (machine / f"tmp/limosa-{uid}/jobs").mkdir(parents=True)
        for path in (machine / f"tmp/limosa-{uid}", machine / f"tmp/limosa-{uid}/jobs"):
            os.chown(path, uid, uid)

    def look() -> list[int]:
        with no_descriptors_left(but=20), places.folders("jobs", whole=True) as found:
            return [f.uid for f in found][:2]

    assert look()[0] == 0
    assert as_user(EVE, look) == [EVE, 0]
