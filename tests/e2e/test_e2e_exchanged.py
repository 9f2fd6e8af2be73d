"""A user exchanges what his job had open for what is root's, between limosa's look and CRIU's open."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from limosa.process.criu.find import find

pytestmark = [pytest.mark.criu]

USER = 4242
SECRET = b"root's own "


@pytest.fixture
def roots(tmp_path: Path) -> Path:
    """A folder that only root can get into, with a file of the size and mode of each of the job's."""
    folder = tmp_path / "roots"
    folder.mkdir(mode=0o700)
    return folder


@pytest.fixture
def before_criu(tmp_path: Path, limosa) -> object:
    """Makes a CRIU that runs a shell command when it is to restore: Limosa has looked by then."""

    def make(command: str) -> Path:
        program, armed = tmp_path / "criu-after", tmp_path / "armed"
        real = shlex.join(find().argv)
        restoring = f'[ -e {armed} ] && case " $* " in *" restore "*) true;; *) false;; esac'
        program.write_text(
            f'#!/bin/sh\nif {restoring}; then rm {armed}; (unset LD_PRELOAD; {command}); fi\nexec {real} "$@"\n'
        )
        program.chmod(0o755)
        limosa("doctor", "--criu", program)  # it is tried, and its version asked for
        armed.touch()
        return program

    return make


def twin(path: Path, roots: Path) -> Path:
    """A file of root's that CRIU cannot tell from the job's."""
    info, made = path.stat(), roots / path.name
    made.write_bytes((SECRET * (info.st_size // len(SECRET) + 1))[: info.st_size])
    made.chmod(info.st_mode & 0o7777)
    return made


@pytest.mark.parametrize("name", ["output", "mapped", ""], ids=lambda name: name or "folder")
def test_what_criu_opens_is_what_was_looked_at(start, limosa, tmp_path, roots, before_criu, name) -> None:
    victim, image = start("open_files"), tmp_path / "image"
    victim.goes_on()
    limosa("checkpoint", victim.pid, "--output", image, rc=0)
    folder = Path(victim.folder)
    for path in folder.iterdir():
        if path.is_file():
            twin(path, roots)
    roots.chmod(folder.stat().st_mode & 0o7777)
    there = {path.name: path.read_bytes() for path in roots.iterdir()}
    job = folder / name if name else folder
    target = roots / name if name else roots
    exchange = f"mv {job} {tmp_path}/away; ln -s {target} {job}"
    done = limosa("restore", image, "--criu", before_criu(exchange), "-o", "json")
    assert (done.rc, done.json["error"]["reasons"][0]["id"]) == (23, "file-changed"), done
    assert "was exchanged while the job was restored" in done.json["error"]["reasons"][0]["text"]
    assert not Path(f"/proc/{victim.pid}").exists(), "it was ended before it ran"
    assert {path.name: path.read_bytes() for path in roots.iterdir()} == there
    job.unlink()
    os.rename(tmp_path / "away", job)
    limosa("restore", image, rc=0)
    victim.goes_on()
    victim.finish()


def test_a_file_that_was_put_in_its_place_in_good_time_is_taken(start, limosa, tmp_path) -> None:
    """An editor, or a backup that was brought back, makes a new file: the same name, size and mode."""
    victim, image = start("open_files"), tmp_path / "image"
    limosa("checkpoint", victim.pid, "--output", image, rc=0)
    output = Path(victim.folder) / "output"
    copy = output.with_name("copy")
    copy.write_bytes(output.read_bytes())
    copy.chmod(output.stat().st_mode & 0o7777)
    os.replace(copy, output)
    limosa("restore", image, rc=0)
    victim.goes_on()
    victim.finish()


_EXCHANGES = f"""
import os, sys, time
name, away, target = sys.argv[1:]
os.setgroups([]); os.setresgid({USER}, {USER}, {USER}); os.setresuid({USER}, {USER}, {USER})
print("ready", flush=True)
while True:
    os.rename(name, away)
    os.symlink(target, name)
    time.sleep(float(os.urandom(1)[0]) / 20000)
    os.unlink(name)
    os.rename(away, name)
    time.sleep(float(os.urandom(1)[0]) / 5000)
"""


@pytest.fixture
def users_folder(start) -> Iterator[object]:
    """A job whose files and folder are another user's, where he can get at them: pytest's own is root's alone."""
    public = Path(tempfile.mkdtemp(prefix="limosa-exchanged-"))
    public.chmod(0o755)
    victim = start("open_files", folder=public / "job")
    for path in (public / "job", *(public / "job").iterdir()):
        os.chown(path, USER, USER)
    yield victim
    victim.kill()
    shutil.rmtree(public, ignore_errors=True)


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.parametrize("rewinds", [False, True], ids=["", "rewind-files"])
def test_a_user_who_exchanges_his_file_all_the_time_gains_nothing(
    users_folder, limosa, tmp_path, roots, rewinds
) -> None:
    victim, image = users_folder, tmp_path / "image"
    limosa("checkpoint", victim.pid, "--output", image, rc=0)
    output = Path(victim.folder) / "output"
    size = output.stat().st_size
    if rewinds:
        with open(output, "ab") as file:
            file.write(b"TAIL")
    secret = twin(output, roots)
    content = secret.read_bytes()
    options = ["--rewind-files"] if rewinds else []
    rounds = int(os.environ.get("LIMOSA_EXCHANGES", "3"))
    argv = [sys.executable, "-c", _EXCHANGES, str(output), str(output.with_name("away")), str(secret)]
    codes = []
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
        watch = threading.Timer(300, process.kill)
        watch.start()
        try:
            assert process.stdout is not None
            process.stdout.readline()
            for _ in range(rounds):
                done = limosa("restore", image, *options, "--no-verify")
                codes.append(done.rc)
                if done.rc == 40:  # his file was another one when its tail was to go back, too
                    assert rewinds, done
                    assert "is another file than before" in done.stderr
                    limosa("recover")
                else:
                    assert done.rc in (0, 21, 23), done
                assert secret.read_bytes() == content
                assert os.listdir(roots) == ["output"]
                if done.rc == 0:
                    at = f"/proc/{victim.pid}/fd"
                    opened = {os.stat(f"{at}/{fd}").st_ino for fd in os.listdir(at)}
                    assert secret.stat().st_ino not in opened
                    break
        finally:
            watch.cancel()
            process.kill()
    assert codes
    assert output.with_name("away").exists() or output.stat().st_size >= size


@pytest.fixture
def in_users_folder(start) -> Iterator[object]:
    """Starts a job in a folder of another user's."""
    public = Path(tempfile.mkdtemp(prefix="limosa-exchanged-"))
    public.chmod(0o755)

    def go(program: str):
        victim = start(program, folder=public / "job")
        for path in (public / "job", *(public / "job").iterdir()):
            os.chown(path, USER, USER)
        return victim

    yield go
    shutil.rmtree(public, ignore_errors=True)


@pytest.mark.root
@pytest.mark.parametrize("program", ["sockets", "unlinked", "folders"])
def test_what_criu_makes_in_a_users_folder_is_there_again(in_users_folder, limosa, tmp_path, program) -> None:
    """Sockets, deleted files and folders, which it makes by name."""
    victim, image = in_users_folder(program), tmp_path / "image"
    limosa("checkpoint", victim.pid, "--output", image, "--tcp-established", rc=0)
    there = {path.name: path.lstat().st_uid for path in Path(victim.folder).iterdir()}
    limosa("restore", image, rc=0)
    victim.goes_on()
    assert there.items() <= {path.name: path.lstat().st_uid for path in Path(victim.folder).iterdir()}.items()
    victim.finish()


_TAKES = f"""
import os, sys
os.setgroups([]); os.setresgid({USER}, {USER}, {USER}); os.setresuid({USER}, {USER}, {USER})
print("ready", flush=True)
while True:
    for name in os.listdir(sys.argv[1]):
        if name.endswith(".ghost"):
            os.rename(os.path.join(sys.argv[1], name), os.path.join(sys.argv[1], "taken"))
            sys.exit()
"""


@pytest.mark.root
def test_who_takes_a_deleted_program_away_while_it_is_made_anew_has_none_of_roots(start, limosa, tmp_path) -> None:
    public = Path(tempfile.mkdtemp(prefix="limosa-exchanged-"))
    public.chmod(0o755)
    folder, image = public / "job", tmp_path / "image"
    victim = start("deleted_program", str(USER), folder=folder)
    os.chown(folder, USER, USER)
    limosa("checkpoint", victim.pid, "--output", image, rc=0)
    with subprocess.Popen([sys.executable, "-c", _TAKES, str(folder)], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            done = limosa("restore", image)
            if done.rc:  # else it was quicker than he
                info = (folder / "taken").stat()
                assert not (info.st_uid == 0 and info.st_mode & 0o6000)
        finally:
            process.kill()
    if done.rc:
        limosa("restore", image, rc=0)
    victim.goes_on()
    victim.finish()
    shutil.rmtree(public, ignore_errors=True)


@pytest.fixture
def roots_socket(roots: Path) -> Iterator[socket.socket]:
    """A service of root's, by the name that the job's socket has."""
    roots.chmod(0o755)
    with socket.create_server(str(roots / "sock"), family=socket.AF_UNIX) as service:
        yield service


@pytest.mark.root
@pytest.mark.parametrize("when", ["in good time", "after limosa has looked", "its own name"])
def test_a_socket_of_roots_is_neither_removed_nor_taken(
    in_users_folder, limosa, tmp_path, roots, roots_socket, before_criu, when
) -> None:
    """A user puts a link in the place of the folder in which his job has a socket."""
    victim, image = in_users_folder("sockets"), tmp_path / "image"
    limosa("checkpoint", victim.pid, "--output", image, "--tcp-established", rc=0)
    job = Path(victim.folder)
    exchange = f"mv {job} {job}.away; ln -s {roots} {job}; chown -h {USER} {job}"
    options = []
    if when == "its own name":
        exchange = f"rm {job}/sock; ln {roots}/sock {job}/sock"
    if when == "after limosa has looked":
        options = ["--criu", before_criu(exchange)]
    else:
        subprocess.run(exchange, shell=True, check=True, timeout=60)
    had = os.lstat(roots / "sock")
    done = limosa("restore", image, *options, "-o", "json")
    assert (done.rc, done.json["error"].get("reasons", [{}])[0].get("id")) == (23, "file-changed"), done
    assert (os.lstat(roots / "sock").st_ino, os.lstat(roots / "sock").st_uid) == (had.st_ino, 0)
    assert os.listdir(roots) == ["sock"]
    assert not Path(f"/proc/{victim.pid}").exists()


@pytest.mark.root
@pytest.mark.parametrize("owner", [USER, 0])
@pytest.mark.parametrize("way", ["{}/sock", "/proc/self/root{}/sock", "//proc/..{}/sock"], ids=["", "by root", "by .."])
def test_a_socket_is_made_only_where_its_owner_could_make_it(start, limosa, tmp_path, roots, way, owner) -> None:
    """A user binds it in a root folder of his own: its name is one of root's outside."""
    roots.chmod(0o755)
    victim, image = start("jailed_socket", way.format(roots), str(owner)), tmp_path / "image"
    force = []
    if owner or "self" in way:
        no = limosa("checkpoint", victim.pid, "--output", image, "-o", "json")
        assert (no.rc, no.json["error"]["reasons"][0]["id"]) == (13, "socket-name"), no
        assert not image.exists()
        victim.goes_on(2)
        force = ["--force=socket-name"]
    limosa("checkpoint", victim.pid, "--output", image, *force, rc=0)
    done = limosa("restore", image, "-o", "json")
    if owner or "self" in way:
        assert (done.rc, done.json["error"].get("reasons", [{}])[0].get("id")) == (23, "file-changed"), done
        assert not os.listdir(roots)
        assert not Path(f"/proc/{victim.pid}").exists()
    else:
        assert done.rc == 0, "a job of root's own"
        assert os.listdir(roots) == ["sock"]
        victim.finish()


@pytest.mark.root
def test_a_socket_behind_a_link_of_its_users_is_told_before_the_job_ends(start, limosa, tmp_path) -> None:
    """A restore by root follows no such link. One of root's is followed."""
    public = Path(tempfile.mkdtemp(prefix="limosa-exchanged-"))
    public.chmod(0o755)
    (public / "scratch").mkdir()
    link = public / "tmp"
    link.symlink_to(public / "scratch")
    os.lchown(link, USER, USER)
    try:
        victim, image = start("sockets", folder=link), tmp_path / "image"
        no = limosa("checkpoint", victim.pid, "--output", image, "-o", "json")
        assert (no.rc, no.json["error"]["reasons"][0]["id"]) == (13, "socket-name"), no
        assert "symbolic link" in no.json["error"]["message"]
        victim.goes_on(2)
        os.lchown(link, 0, 0)
        limosa("checkpoint", victim.pid, "--output", image, rc=0)
        limosa("restore", image, rc=0)
        victim.finish()
    finally:
        shutil.rmtree(public)
