"""Which CRIU is found, the trial, what is kept of it; and the private folder, fetched for real."""

from __future__ import annotations

import os
import resource
import stat
from pathlib import Path

import msgspec
import pytest

from limosa.errors import CriuNotPermitted, NoWorkingCriu
from limosa.process import settings
from limosa.process.criu import fetch, find, network, program
from limosa.process.criu.trial import TrialResult, missing_right, trial

ALL = (1 << 41) - 1


@pytest.fixture
def alone(tmp_path, monkeypatch) -> Path:
    """No settings, no system CRIU, no private folder, an empty cache."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(settings, "SYSTEM_FILE", tmp_path / "limosa.toml")
    monkeypatch.setattr(find, "system_program", lambda _: None)
    monkeypatch.setattr(fetch, "folders", list)
    return tmp_path


def private_folder(criu) -> Path:
    """Where a private folder's program lies, seen from the folder."""
    if not criu.private:
        pytest.fail("these tests need the private folder: limosa doctor --fix")
    return Path(criu.path).parents[2]


# --- the trial -------------------------------------------------------------------------------------------------


@pytest.mark.criu
def test_the_trial_passes_and_leaves_nothing(criu, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    before = set(network.tables(criu))
    result = trial(criu)
    assert result.ok, result.reason
    assert result.reason == ""
    assert 0 < result.seconds < 250
    assert list(tmp_path.iterdir()) == []
    assert not set(network.tables(criu)) - before


@pytest.mark.criu
def test_the_trial_says_what_is_wrong_with_a_criu_that_cannot_run(criu):
    broken = msgspec.structs.replace(criu, argv=["/bin/false"])
    result = trial(broken)
    assert not result.ok
    assert result.permitted
    assert "ended with status 1" in result.reason


def test_missing_rights_are_named():
    assert missing_right(ALL, 0) == ""
    assert missing_right(ALL, 1000) == ""
    text = missing_right(0, 1000)
    assert "uid 1000 lacks CAP_SYS_PTRACE and CAP_SYS_ADMIN (or CAP_CHECKPOINT_RESTORE)" in text
    text = missing_right(ALL & ~(1 << 21) & ~(1 << 40), 0)
    assert "this container's root lacks CAP_SYS_ADMIN (or CAP_CHECKPOINT_RESTORE)" in text
    assert missing_right(ALL & ~(1 << 21), 0) == ""  # CAP_CHECKPOINT_RESTORE may do


@pytest.mark.criu
def test_without_the_right_find_says_so_at_once(criu, alone):
    """As another user: the folder was found, the trial was not run, the way out is sudo."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.setgid(65534)
            os.setuid(65534)
            os.environ["XDG_CACHE_HOME"] = "/nonexistent"
            find.find(str(private_folder(criu)))
        except NoWorkingCriu as error:
            told = "uid 65534 lacks" in error.message and "sudo" in error.hint
            status = 0 if told and error.exit_code == 11 else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


# --- which one -------------------------------------------------------------------------------------------------


def test_without_the_right_none_at_all_is_not_what_is_missing(alone, monkeypatch):
    monkeypatch.setattr(find, "effective_capabilities", lambda: 0)
    for uid, hint in ((1000, "use sudo"), (0, "give this container")):
        monkeypatch.setattr(os, "geteuid", lambda uid=uid: uid)
        with pytest.raises(CriuNotPermitted, match=r"CRIU is not permitted to run: .* lacks") as caught:
            find.find()
        assert caught.value.exit_code == 11
        assert caught.value.hint.startswith(hint)


def test_none_at_all_is_said_with_the_way_out(alone):
    with pytest.raises(NoWorkingCriu, match="none is installed") as caught:
        find.find()
    assert "doctor --fix" in caught.value.hint


def test_a_program_that_is_not_criu_is_named(alone):
    with pytest.raises(NoWorkingCriu, match="/bin/true is not CRIU") as caught:
        find.find("/bin/true")
    assert "Copyright" not in str(caught.value), "one line of what it says is enough"
    with pytest.raises(NoWorkingCriu, match="/nonexistent/criu cannot be started"):
        find.find("/nonexistent/criu")


@pytest.mark.criu
def test_explicit_then_setting_then_system_then_private_folder(criu, alone, monkeypatch):
    folder = private_folder(criu)
    seen: list[str] = []

    def passes(found, **_) -> TrialResult:
        seen.append(found.path)
        return TrialResult(ok=not found.path.startswith(str(alone)), reason="too old")

    monkeypatch.setattr(find, "tried", passes)
    old = alone / "old"
    old.mkdir()
    for name in ("usr", "VERSIONS"):
        (old / name).symlink_to(folder / name)
    monkeypatch.setattr(fetch, "folders", lambda: [old, folder])
    assert find.find().path == criu.path
    assert seen == [str(old / "usr/sbin/criu"), criu.path]  # the first did not pass, the second did
    (alone / "config/limosa").mkdir(parents=True)
    (alone / "config/limosa/config.toml").write_text(f'criu = "{old}"\n')
    with pytest.raises(NoWorkingCriu, match=r"the setting criu .*too old"):  # what is named is not passed over
        find.find()
    assert find.find(str(folder)).path == criu.path


@pytest.mark.criu
def test_a_folder_that_others_may_write_to_is_refused(criu, alone, tmp_path):
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(private_folder(criu), copy, symlinks=True)
    os.chmod(copy / "usr/sbin", 0o777)
    with pytest.raises(NoWorkingCriu, match="may be written to by others"):
        find.find(str(copy))
    os.chmod(copy / "usr/sbin", 0o755)
    os.chown(copy / "usr/sbin/criu", 65534, -1)
    with pytest.raises(NoWorkingCriu, match="may be written to by others"):
        find.find(str(copy))


# --- what is kept ------------------------------------------------------------------------------------------------


@pytest.fixture
def counted(alone, monkeypatch) -> list[str]:
    tries: list[str] = []

    def count(criu) -> TrialResult:
        tries.append(criu.path)
        return TrialResult(ok=True, network_lock="skip")

    monkeypatch.setattr(find, "trial", count)
    return tries


@pytest.mark.criu
def test_the_answer_is_kept_and_asked_again_when_told_so(criu, counted):
    folder = str(private_folder(criu))
    assert find.find(folder).network_lock == "skip"
    assert find.find(folder).network_lock == "skip"
    assert len(counted) == 1
    find.find(folder, use_cache=False)
    assert len(counted) == 2


@pytest.mark.criu
def test_another_build_or_kernel_or_right_is_tried_anew(criu, counted, monkeypatch):
    folder = str(private_folder(criu))
    find.find(folder)
    monkeypatch.setattr(find, "effective_capabilities", lambda: 7)
    find.find(folder)
    assert len(counted) == 2
    monkeypatch.setattr(find, "build_identity", lambda _: "another")
    find.find(folder)
    assert len(counted) == 3
    # A "no" that was said under a limit is not kept for who has none.
    monkeypatch.setattr(find.resource, "getrlimit", lambda _: (1 << 16, 1 << 16))
    find.find(folder)
    assert len(counted) == 4
    monkeypatch.setattr(
        find.resource, "getrlimit", lambda of: (41 if of == resource.RLIMIT_NOFILE else 1 << 16, 1 << 16)
    )
    find.find(folder)
    assert len(counted) == 5


@pytest.mark.criu
@pytest.mark.parametrize("spoil", ["owner", "mode", "link", "content", "key"])
def test_an_answer_that_others_could_have_written_does_not_count(criu, counted, alone, spoil):
    folder = str(private_folder(criu))
    find.find(folder)
    (file,) = (alone / "cache/limosa").glob("criu-trial-*.json")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    if spoil == "owner":
        os.chown(file, 65534, -1)
    elif spoil == "mode":
        file.chmod(0o622)
    elif spoil == "link":
        file.rename(alone / "elsewhere")
        file.symlink_to(alone / "elsewhere")
    elif spoil == "content":
        file.write_text("{")
    else:
        file.write_text(file.read_text().replace("uid 0", "uid 1"))
    find.find(folder)
    assert len(counted) == 2


@pytest.mark.criu
def test_a_no_is_not_kept_for_long(criu, alone, monkeypatch):
    tries = []
    monkeypatch.setattr(find, "trial", lambda _: tries.append(1) or TrialResult(ok=False, reason="busy"))
    for expected in (1, 1):
        with pytest.raises(NoWorkingCriu, match="busy"):
            find.find(str(private_folder(criu)))
        assert len(tries) == expected
    monkeypatch.setattr(find, "NO_KEPT", 0)
    with pytest.raises(NoWorkingCriu):
        find.find(str(private_folder(criu)))
    assert len(tries) == 2


@pytest.mark.criu
def test_that_connections_cannot_be_shut_is_looked_at_again_later(criu, alone, monkeypatch):
    tries = []
    monkeypatch.setattr(find, "trial", lambda _: tries.append(1) or TrialResult(ok=True, network_lock="skip"))
    for expected in (1, 1):
        assert find.find(str(private_folder(criu))).network_lock == "skip"
        assert len(tries) == expected
    monkeypatch.setattr(find, "SKIP_KEPT", 0)
    find.find(str(private_folder(criu)))
    assert len(tries) == 2


# --- the private folder ------------------------------------------------------------------------------------------


def test_the_mirror_is_that_of_the_installed_system():
    listing = """http://packages.example.com/apt bookworm main
http://deb.example.org/debian-security/ bookworm-security main
http://deb.example.org/debian/ bookworm main
http://deb.example.org/debian/ bookworm-updates main
http://mirror.example.net/debian sid main
"""
    assert fetch.debian_mirror(listing, "bookworm") == "http://packages.example.com/apt"
    assert fetch.debian_mirror("\n".join(listing.splitlines()[1:]), "bookworm") == "http://deb.example.org/debian"
    assert fetch.debian_mirror(listing, "trixie") == "http://mirror.example.net/debian"
    assert fetch.debian_mirror("", "bookworm") is None


def test_the_setting_for_the_mirror_wins(alone):
    settings.user_file().parent.mkdir(parents=True)
    settings.user_file().write_text('debian_mirror = "http://mirror.example.org/debian"\n')
    assert fetch.mirror_of_this_machine() == "http://mirror.example.org/debian"


def test_a_mirror_that_is_not_there_is_said_and_leaves_nothing(alone, monkeypatch):
    monkeypatch.setattr(fetch, "mirror_of_this_machine", lambda: "http://127.0.0.1:9/debian")
    monkeypatch.setattr(fetch, "APT_CONF", fetch.APT_CONF.replace('Retries "3"', 'Retries "0"'))
    (alone / "share").mkdir()
    with pytest.raises(NoWorkingCriu, match="apt-get update"):
        fetch.fetch(target=alone / "share/criu")
    assert list((alone / "share").iterdir()) == []


@pytest.mark.criu
def test_a_folder_without_its_loader_is_no_private_folder(criu, tmp_path):
    (tmp_path / "usr/sbin").mkdir(parents=True)
    (tmp_path / "usr/sbin/criu").write_bytes(Path(criu.path).read_bytes())
    with pytest.raises(NoWorkingCriu, match="their loader"):
        program.from_folder(tmp_path)


@pytest.mark.criu
@pytest.mark.slow
@pytest.mark.network
def test_fetching_makes_a_folder_that_passes_the_trial_in_place_of_the_old_one(alone):
    place = alone / "share/criu"
    place.mkdir(parents=True)
    (place / "old").touch()
    said: list[str] = []
    found = fetch.fetch(said.append, target=place)
    assert not (place / "old").exists()
    assert [path.name for path in place.parent.iterdir()] == ["criu"]
    lines = (place / program.VERSIONS_FILE).read_text().splitlines()
    assert {"criu", "nftables", "libc6"} <= {line.split()[0] for line in lines}
    assert found.version in next(line for line in lines if line.startswith("criu "))
    assert said
    assert trial(found).ok
    assert network.tables(found) is not None


@pytest.mark.criu
@pytest.mark.slow
@pytest.mark.network
def test_a_criu_that_is_too_old_for_this_kernel_fails_the_trial(alone):
    old = fetch.fetch(target=alone / "share/criu", suite="bookworm")
    assert old.version.startswith("3.17")
    result = trial(old)
    if tuple(int(part) for part in os.uname().release.split(".")[:2]) >= (6, 18):
        assert not result.ok
        assert "too old for this kernel" in result.reason
    else:  # what it says there is not known; that it says something is
        assert result.ok == (result.reason == "")


@pytest.mark.criu
@pytest.mark.slow
@pytest.mark.network
def test_somebody_without_rights_can_fetch_too(alone):
    place = alone / "home"
    place.mkdir()
    for path in (alone, *alone.parents):
        if path.stat().st_uid == 0 and not path.stat().st_mode & 0o001:
            path.chmod(path.stat().st_mode | 0o011)
    os.chown(place, 65534, 65534)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.setgid(65534)
            os.setuid(65534)
            os.environ["HOME"] = str(place)
            status = 0 if fetch.fetch(target=place / "criu").version else 2
        except NoWorkingCriu as error:
            os.write(2, str(error).encode())
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
